"""Certificates for tests: one authority a folder, and a stranger's beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from allspan.launch.certificates import Authority

HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Certificates:
    """Files NAME.pem and NAME.key of "ca", "server", "client"; and those of a "stranger" (authority) and its "foreign"
    certificate, which is for the same hosts."""

    folder: Path

    def __post_init__(self) -> None:
        for authority, issued in (("ca", ("server", "client")), ("stranger", ("foreign",))):
            made = Authority(authority)
            made.own.write(self.folder, authority)
            for name in issued:
                made.issue(name, HOSTS).write(self.folder, name)

    def pem(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")

    def key(self, name: str) -> str:
        return str(self.folder / f"{name}.key")

    def read(self, name: str) -> tuple[bytes, bytes]:
        """Certificate and key."""
        return Path(self.pem(name)).read_bytes(), Path(self.key(name)).read_bytes()
