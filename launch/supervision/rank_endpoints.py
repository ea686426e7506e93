"""How clients reach the ranks: unix sockets of this host, or TCP with certificates on both ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.tls import NO_TLS, TlsFiles

FOLDER = "wire"
SERVER_NAME = "allspan-rank"
"""What a certificate made here is for, whatever host a rank runs on: its authority issues no other."""


@dataclass(frozen=True, slots=True)
class WireConfig:
    """Where ranks listen for the gateway and other facades."""

    rank_host: str = ""
    """Address on which ranks listen over TCP, only for clients with a certificate (0.0.0.0: all addresses, known by the
    host's name); empty: unix sockets of this host."""
    rank_port: int = 0
    """Port of rank 0; the others follow, replica after replica. 0: any free ones, published in cluster.json."""
    rank_ssl_certfile: str = ""
    """The certificate that ranks and clients show each other, in PEM form; empty: made at the start, with its key and
    authority, in the folder wire/ of the run directory."""
    rank_ssl_keyfile: str = ""
    """Its private key."""
    rank_ssl_ca_certs: str = ""
    """The authority that both ends' certificates must be from; best one that issues nothing else."""

    @property
    def given(self) -> TlsFiles:
        return TlsFiles(self.rank_ssl_ca_certs, self.rank_ssl_certfile, self.rank_ssl_keyfile)

    def check(self) -> None:
        """Before anything is started. ConfigError names the flag."""
        if (self.given.is_given or self.rank_port) and not self.rank_host:
            raise ConfigError("--rank-port or --rank-ssl-… is given without --rank-host: ranks are on unix sockets")
        if self.given.is_given:
            self.given.read()

    def prepare(self, run_dir: Path) -> TlsFiles:
        """The files that both ends use."""
        if not self.rank_host:
            return NO_TLS
        if self.given.is_given:
            return self.given
        from allspan.launch.certificates import Authority

        folder = run_dir / FOLDER
        folder.mkdir(mode=0o700)
        authority = Authority("allspan ranks")
        (folder / "ca.pem").write_bytes(authority.own.certificate)  # its key is kept nowhere: it issues nothing else
        authority.issue(SERVER_NAME, [SERVER_NAME]).write(folder, "rank")
        ca, certificate, key = (str(folder / name) for name in ("ca.pem", "rank.pem", "rank.key"))
        return TlsFiles(ca, certificate, key, SERVER_NAME)
