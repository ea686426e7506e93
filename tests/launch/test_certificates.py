"""`allspan certs`: what it makes is believed by TLS, and only for the hosts that it was made for."""

from __future__ import annotations

import contextlib
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from allspan.client.gateway.auth.tls import Tls
from allspan.client.gateway.config import SecurityConfig
from allspan.launch.certificates import make_certificates
from allspan.launch.cli import main
from allspan.protos.api.errors import ConfigError


def shake_hands(folder: Path, host: str) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    server.load_verify_locations(folder / "ca.pem")
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    client.load_cert_chain(folder / "client.pem", folder / "client.key")
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs, contextlib.suppress(OSError):  # the client has hung up
            server.wrap_socket(theirs, server_side=True).close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours:
            client.wrap_socket(ours, server_hostname=host).close()
    finally:
        thread.join(5)


def test_both_ends_believe_each_other_for_the_hosts_that_were_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    assert main(["certs", str(folder), "--hosts", "llm.example,10.0.0.7,fd00::7"]) == 0
    assert f"--ssl-certfile {folder}/server.pem" in capsys.readouterr().err
    for host in ("llm.example", "10.0.0.7", "fd00::7"):
        shake_hands(folder, host)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"doesn't match|not valid for"):
        shake_hands(folder, "other.example")
    assert {stat.S_IMODE(key.stat().st_mode) for key in folder.glob("*.key")} == {0o600}


def test_a_second_time_replaces_nothing(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"])
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(ConfigError, match=r"ca\.key exists"):
        make_certificates(tmp_path, ["localhost"])
    assert (tmp_path / "ca.pem").read_bytes() == before


def test_what_is_no_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a name nor an address"):
        make_certificates(tmp_path / "new", ["höst"])


def test_an_encrypted_key_is_refused_rather_than_asked_about(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"])
    key = serialization.load_pem_private_key((tmp_path / "server.key").read_bytes(), None)
    (tmp_path / "locked.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="encrypted with a passphrase"):
        Tls(SecurityConfig(ssl_certfile=str(tmp_path / "server.pem"), ssl_keyfile=str(tmp_path / "locked.key")))
