"""The ranks' endpoints: unix sockets of this host, or TCP with certificates on both ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.tls import NO_TLS, TlsFiles

FOLDER = "wire"
SERVER_NAME = "allspan-rank"
"""The server name in the certificates made here, whatever host a rank runs on: their authority issues no other."""


@dataclass(frozen=True, slots=True)
class WireConfig:
    """The addresses on which ranks listen for the gateway and other clients."""

    rank_host: str = ""
    """Makes the ranks listen on this address over TCP, for clients with a certificate only (0.0.0.0: all addresses,
    published under the host's name); empty uses unix sockets of this host."""
    rank_port: int = 0
    """Sets the TCP port of rank 0; the other ranks' follow, replica after replica. 0 takes any free ones, published in
    cluster.json."""
    rank_ssl_certfile: str = ""
    """Names the PEM certificate that ranks and clients show each other; empty makes one at the start, with its key and
    authority, in the folder wire/ of the run directory."""
    rank_ssl_keyfile: str = ""
    """Names the PEM file of its private key."""
    rank_ssl_ca_certs: str = ""
    """Names the PEM file of the authority that both ends' certificates must be from; preferably one that issues nothing
    else."""

    @property
    def given(self) -> TlsFiles:
        return TlsFiles(self.rank_ssl_ca_certs, self.rank_ssl_certfile, self.rank_ssl_keyfile)

    def check(self) -> None:
        """Checks these settings before anything is started. ConfigError names the flag."""
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
