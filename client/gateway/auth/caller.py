"""The caller of the present request, known to all code that runs on its behalf."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller as its key identifies it; without keys all calls have the same nameless caller."""

    owner: str = ""
    """A short name derived from the key, which reveals nothing of it: it stands in logs and marks a request's owner."""
    is_admin: bool = False
    """Came with the admin key."""

    def may_end(self, owner: str) -> bool:
        """Returns whether the caller may end the requests of `owner`: its own, or all with the admin key."""
        return self.is_admin or owner == self.owner


ANYONE = Caller()


def salt_of(owner: str, salt: str) -> str:
    """Returns the prefix cache's salt of a request of `owner` that asked for `salt`; no other owner's requests have it.
    Without keys, where `owner` is "", it is the one asked for."""
    return hashlib.sha256(f"{owner}\0{salt}".encode("utf-8", "surrogatepass")).hexdigest() if owner else salt


_current: ContextVar[Caller] = ContextVar("allspan_caller", default=ANYONE)


def current_caller() -> Caller:
    """Returns the caller whose request this task, or the one that started it, works on."""
    return _current.get()


def set_caller(caller: Caller) -> None:
    """Sets the caller for the rest of this task; called once, where a request comes in."""
    _current.set(caller)
