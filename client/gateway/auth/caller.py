"""The caller of the present request, known to all code that runs on its behalf."""

from __future__ import annotations

import hmac
from contextvars import ContextVar
from dataclasses import dataclass, field

from allspan.protos.api.errors import PermissionDenied


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller as its key identifies it; without keys all calls have the same nameless caller."""

    owner: str = ""
    """A short name derived from the key, which reveals nothing of it: it stands in logs and marks a request's owner."""
    is_admin: bool = False
    """Came with the admin key."""
    cache_key: bytes = field(default=b"", repr=False, compare=False)
    """A secret made of its key, b"" without keys: see `cache_salt`."""

    def may_end(self, owner: str) -> bool:
        """Returns whether the caller may end the requests of `owner`: its own, or all with the admin key."""
        return self.is_admin or owner == self.owner


ANYONE = Caller()


def cache_salt(cache_key: bytes, salt: str) -> str:
    """Returns the prefix cache's salt of a request that asked for `salt`: with the `cache_key` of its caller, one that
    nobody else has or can ask for; without, the one asked for."""
    return hmac.digest(cache_key, salt.encode("utf-8", "surrogatepass"), "sha256").hex() if cache_key else salt


_current: ContextVar[Caller] = ContextVar("allspan_caller", default=ANYONE)


def current_caller() -> Caller:
    """Returns the caller whose request this task, or the one that started it, works on."""
    return _current.get()


def check_admin() -> None:
    """Raises PermissionDenied, with the way out, for a caller without the admin key."""
    if not current_caller().is_admin:
        raise PermissionDenied(
            "this endpoint needs the admin key, and no other does; a server without one answers nobody here: start it "
            "with --admin-api-key-file FILE (or ALLSPAN_ADMIN_API_KEY)"
        )


def set_caller(caller: Caller) -> None:
    """Sets the caller for the rest of this task; called once, where a request comes in."""
    _current.set(caller)
