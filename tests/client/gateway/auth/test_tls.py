"""TLS and client certificates, over HTTP and gRPC alike; renewal while connections go on; files that do not fit."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from allspan.client.gateway.app import bind
from allspan.client.gateway.auth import tls
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import ConfigError
from support.certificates import Certificates
from support.fake_engine import ANSWER
from support.gateway import Gateway, gateway, gateway_config, stub


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def flags(made: Certificates, **more: Any) -> dict[str, Any]:
    return {"ssl_certfile": made.pem("server"), "ssl_keyfile": made.key("server")} | more


async def http_text(server: Gateway, made: Certificates, ca: str = "ca", client: str = "") -> str:
    context = ssl.create_default_context(cafile=made.pem(ca))
    if client:
        context.load_cert_chain(made.pem(client), made.key(client))
    async with httpx.AsyncClient(base_url=server.http_address, verify=context, trust_env=False) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 100})
    return str(response.json()["choices"][0]["text"])


async def grpc_text(server: Gateway, made: Certificates, ca: str = "ca", client: str = "") -> str:
    certificate, key = made.read(client) if client else (None, None)
    credentials = grpc.ssl_channel_credentials(Path(made.pem(ca)).read_bytes(), key, certificate)
    async with grpc.aio.secure_channel(server.grpc_address, credentials) as channel:
        call = stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=5)
        return "".join([response.text async for response in call])


async def test_http_and_grpc_are_tls_and_clients_that_trust_another_authority_are_off(
    certificates: Certificates,
) -> None:
    async with gateway(**flags(certificates)) as server:
        assert server.http_address.startswith("https://")
        assert await http_text(server, certificates) == ANSWER
        assert await grpc_text(server, certificates) == ANSWER
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http_text(server, certificates, ca="stranger")
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await grpc_text(server, certificates, ca="stranger")


async def test_plain_clients_get_no_answer(certificates: Certificates) -> None:
    async with gateway(**flags(certificates)) as server:
        async with httpx.AsyncClient(trust_env=False) as http:
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get(server.http_address.replace("https", "http") + "/health")
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await stub(channel).ListModels(pb.ListModelsRequest(), timeout=5)
        assert await grpc_text(server, certificates) == ANSWER
        assert not [asked for asked in server.engine.asked.values() if not asked.released]


async def test_client_certificates_are_required_and_checked(certificates: Certificates) -> None:
    settings = flags(certificates, ssl_ca_certs=certificates.pem("ca"), ssl_cert_reqs=2)
    async with gateway(**settings) as server:
        assert await http_text(server, certificates, client="client") == ANSWER
        assert await grpc_text(server, certificates, client="client") == ANSWER
        for client in ("", "foreign"):
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await http_text(server, certificates, client=client)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await grpc_text(server, certificates, client=client)


async def test_certificate_and_key_may_share_a_file(certificates: Certificates, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join(certificates.read("server")))
    async with gateway(ssl_certfile=str(both)) as server:
        assert await http_text(server, certificates) == ANSWER
        assert await grpc_text(server, certificates) == ANSWER


async def test_renewed_files_are_shown_to_new_connections_and_broken_ones_are_not(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "POLL_S", 0.01)
    files = [tmp_path / name for name in ("server.pem", "server.key")]

    def install(name: str) -> None:
        for file, source in zip(files, (certificates.pem(name), certificates.key(name)), strict=True):
            shutil.copy(source, file)
            os.utime(file, ns=(time.time_ns(), time.time_ns()))

    async def until(words: str) -> None:
        async with asyncio.timeout(5):
            while words not in caplog.text:
                await asyncio.sleep(0.01)

    caplog.set_level("INFO")
    install("server")
    async with gateway(ssl_certfile=str(files[0]), ssl_keyfile=str(files[1])) as server:
        assert await grpc_text(server, certificates) == ANSWER
        files[1].write_text("half a key")
        await until("the TLS certificate in use stays")
        assert await http_text(server, certificates) == ANSWER
        assert await grpc_text(server, certificates) == ANSWER
        install("foreign")
        await until("renewed certificate")
        assert await http_text(server, certificates, ca="stranger") == ANSWER
        assert await grpc_text(server, certificates, ca="stranger") == ANSWER


Settings = Callable[[Certificates, Path], dict[str, Any]]
WRONG: list[tuple[Settings, str]] = [
    (lambda made, tmp: flags(made, ssl_certfile=str(tmp / "none.pem")), "--ssl-certfile .*none.pem: No such file"),
    (lambda made, tmp: flags(made, ssl_keyfile=made.key("client")), "the key is not the certificate's"),
    (lambda made, tmp: flags(made, ssl_certfile=made.key("server")), "--ssl-certfile .* are no certificate"),
    (lambda made, tmp: flags(made, ssl_keyfile=""), "no certificate and its key"),
    (lambda made, tmp: {"ssl_keyfile": made.key("server")}, "--ssl-keyfile is given without --ssl-certfile"),
    (lambda made, tmp: flags(made, ssl_ca_certs=made.pem("ca")), "--ssl-cert-reqs 0"),
    (lambda made, tmp: flags(made, ssl_cert_reqs=2), "--ssl-ca-certs is ''"),
    (lambda made, tmp: flags(made, ssl_ca_certs=made.key("ca"), ssl_cert_reqs=2), "--ssl-ca-certs .* holds no cert"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_files_that_do_not_fit_are_refused_before_a_model_loads(
    certificates: Certificates, tmp_path: Path, settings: Settings, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        bind(gateway_config(**settings(certificates, tmp_path)))


@pytest.mark.parametrize("key", [(), ("secret",)])
async def test_with_tls_other_hosts_than_loopback_are_listened_on_and_keys_are_missed(
    certificates: Certificates, key: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(host="0.0.0.0", api_key=key or None, **flags(certificates)):
        pass
    assert ("no API key is set" in caplog.text) is (not key)
