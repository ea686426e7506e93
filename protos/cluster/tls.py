"""Certificate files of the wire between a facade and its ranks. Each end shows a certificate and asks for one."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, fields
from pathlib import Path

from allspan.protos.api.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of files in PEM form; all three, or none."""

    ca_certs: str = ""
    """The file of the authority (its certificates) that both ends' certificates must be from."""
    certfile: str = ""
    keyfile: str = ""
    server_name: str = ""
    """The name that ranks' certificates are for; empty: the host in their address."""

    @property
    def is_given(self) -> bool:
        return bool(self.ca_certs or self.certfile or self.keyfile)

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Returns the contents of the authority's, the certificate's and the key's file. ConfigError names what does
        not fit."""
        contents = []
        for field in fields(self)[:3]:
            path = getattr(self, field.name)
            if not path:
                raise ConfigError(f"TLS of the ranks' wire: {field.name} is missing; give ca_certs, certfile, keyfile")
            try:
                contents.append(Path(path).read_bytes())
            except OSError as error:
                raise ConfigError(f"TLS of the ranks' wire: {field.name} {path}: {error.strerror}") from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.ca_certs)
            context.load_cert_chain(self.certfile, self.keyfile, lambda: b"")
        except ssl.SSLError as error:
            raise ConfigError(
                f"TLS of the ranks' wire: {self.ca_certs}, {self.certfile} and {self.keyfile} are no authority, "
                f"certificate and its key (without a passphrase) in PEM form: {error.reason or error}"
            ) from error
        ca, certificate, key = contents
        return ca, certificate, key


NO_TLS = TlsFiles()


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
