"""Who asks: the caller of the request at hand, known to whatever runs on its behalf."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """As the key says that came with a request; without keys everybody is the same nameless caller."""

    owner: str = ""
    """A short name of the key, which tells nothing of it: fit for logs, and whose requests are whose."""
    is_admin: bool = False
    """Came with the admin key."""

    def may_end(self, owner: str) -> bool:
        """Whether it may end the requests of `owner`: its own, or anybody's with the admin key."""
        return self.is_admin or owner == self.owner


ANYONE = Caller()

_current: ContextVar[Caller] = ContextVar("allspan_caller", default=ANYONE)


def current_caller() -> Caller:
    """Whose request this task, or the one that started it, works on."""
    return _current.get()


def set_caller(caller: Caller) -> None:
    """For the rest of this task: called once, where a request comes in."""
    _current.set(caller)
