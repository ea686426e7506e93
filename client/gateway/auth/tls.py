"""TLS of the gateway, for HTTP and gRPC alike: its certificate, and the authority of clients' certificates."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from allspan.client.gateway.config import SecurityConfig
from allspan.protos.api.errors import ConfigError

POLL_S = 5.0

logger = logging.getLogger("allspan.gateway")


@dataclass(frozen=True)
class Pem:
    """The contents of the PEM files; `ca` is empty when no client certificate is checked."""

    certificate: bytes
    key: bytes
    ca: bytes


class Tls:
    """Reads the files, and reads them again when they change: certificates are renewed while connections go on."""

    def __init__(self, config: SecurityConfig) -> None:
        """ConfigError names the flag, the file and what is wrong with it."""
        self._config = config
        self._contexts: list[ssl.SSLContext] = []
        self._stamp = self._stamps()
        self.pem = self._read()

    @classmethod
    def of(cls, config: SecurityConfig) -> Tls | None:
        """Returns the TLS settings, None when no certificate is given."""
        if config.ssl_certfile:
            return cls(config)
        others = ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs")
        if given := [name for name in others if getattr(config, name)]:
            flag = f"--{given[0].replace('_', '-')}"
            raise ConfigError(f"{flag} is given without --ssl-certfile: TLS needs the server's certificate")
        return None

    @property
    def requires_clients(self) -> bool:
        """Whether a client without a certificate of the authority is refused."""
        return self._config.ssl_cert_reqs == ssl.CERT_REQUIRED

    @property
    def certfile(self) -> str:
        return self._config.ssl_certfile

    def keep(self, context: ssl.SSLContext) -> None:
        """New connections of `context` are shown the renewed certificate, too."""
        self._contexts.append(context)

    async def follow(self) -> None:
        """Looks every POLL_S seconds whether the files are new, until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.renew)

    def renew(self) -> None:
        """Takes up what is new in the files; what does not fit together (yet) is logged and left."""
        try:
            if (stamp := self._stamps()) == self._stamp:
                return
            self._stamp = stamp
            pem = self._read()
            for context in self._contexts:
                context.load_cert_chain(self._config.ssl_certfile, self._config.ssl_keyfile or None, _refuse_password)
        except (ConfigError, OSError) as error:
            logger.warning("the TLS certificate in use stays: %s", error)
            return
        self.pem = pem
        logger.info("new connections are shown the renewed certificate of %s", self._config.ssl_certfile)

    def _stamps(self) -> list[int]:
        names = (self._config.ssl_certfile, self._config.ssl_keyfile, self._config.ssl_ca_certs)
        try:
            return [Path(name).stat().st_mtime_ns for name in names if name]
        except OSError:
            return []  # `_read` says what is missing

    def _read(self) -> Pem:
        config = self._config
        if bool(config.ssl_ca_certs) != bool(config.ssl_cert_reqs):
            raise ConfigError(
                f"--ssl-ca-certs is {config.ssl_ca_certs!r} and --ssl-cert-reqs {config.ssl_cert_reqs}: clients are "
                "asked for certificates with both (--ssl-cert-reqs 2 requires one), or with neither"
            )
        certificate = _bytes("--ssl-certfile", config.ssl_certfile)
        key = _bytes("--ssl-keyfile", config.ssl_keyfile) if config.ssl_keyfile else certificate
        ca = _bytes("--ssl-ca-certs", config.ssl_ca_certs) if config.ssl_ca_certs else b""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, _refuse_password)
        except ssl.SSLError as error:
            files = f"--ssl-certfile {config.ssl_certfile}"
            files += f" and --ssl-keyfile {config.ssl_keyfile}" if config.ssl_keyfile else " (with the key in it)"
            what = "the key is not the certificate's" if error.reason == "KEY_VALUES_MISMATCH" else error.reason
            raise ConfigError(f"{files} are no certificate and its key in PEM form: {what or error}") from error
        if ca:
            try:
                context.load_verify_locations(config.ssl_ca_certs)
            except ssl.SSLError as error:
                raise ConfigError(
                    f"--ssl-ca-certs {config.ssl_ca_certs} holds no certificates in PEM form: {error.reason or error}"
                ) from error
        return Pem(certificate, key, ca)


def _bytes(flag: str, name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {name}: {error.strerror}") from error


def _refuse_password() -> str:
    """Refuses a password prompt: OpenSSL would otherwise wait for input on the server's terminal."""
    raise ConfigError(
        "--ssl-keyfile is encrypted with a passphrase: give a key without one, readable by this user only"
    )
