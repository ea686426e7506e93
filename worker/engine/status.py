"""The states of a rank's engine: one enum, the transitions between its members, and their causes."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from allspan.protos.api.errors import AllspanError, InternalError, Unavailable


class EngineState(enum.Enum):
    """The states of an engine."""

    RUNNING = "running"
    """Requests are accepted."""
    STOPPED = "stopped"
    """Requests are refused until the model is started again; those that were accepted run to their end."""
    CLOSING = "closing"
    """A shutdown was asked for; it happens with the next plan."""
    ENDED = "ended"
    """The step loop has ended in order."""
    FAILED = "failed"
    """An error has ended the step loop."""


_S = EngineState

TRANSITIONS: Mapping[EngineState, frozenset[EngineState]] = {
    _S.RUNNING: frozenset((_S.STOPPED, _S.CLOSING, _S.ENDED, _S.FAILED)),
    _S.STOPPED: frozenset((_S.RUNNING, _S.CLOSING, _S.ENDED, _S.FAILED)),
    _S.CLOSING: frozenset((_S.ENDED, _S.FAILED)),
    _S.ENDED: frozenset((_S.FAILED,)),
    _S.FAILED: frozenset(),
}
"""The states that may follow each state. Every state may also follow itself, with a newer cause."""


_ALIVE = (_S.RUNNING, _S.STOPPED)
_CLOSING = "the engine is shutting down"


class EngineStatus:
    """The present state of an engine and its cause. Every change is made under the lock of the engine's condition.

    `cause`: why requests are refused, in one line; "" exactly while the engine is RUNNING. Reading it needs no lock.
    """

    def __init__(self, rank: int) -> None:
        self.state = EngineState.RUNNING
        self.cause = ""
        self.rank = rank

    def move(self, state: EngineState, cause: str = "") -> None:
        """Enters a state. Raises InternalError for one that cannot follow, or that lacks the cause that it needs."""
        if state is not self.state and state not in TRANSITIONS[self.state]:
            raise InternalError(f"an engine that is {self.state.value} cannot become {state.value} ({cause})")
        if bool(cause) == (state is EngineState.RUNNING):
            raise InternalError(f"an engine that is {state.value} has the cause {cause!r}")
        self.state, self.cause = state, cause

    def end(self, failure: BaseException | None = None) -> None:
        """The step loop is over, for `failure` or in order."""
        if failure is None:
            self.move(EngineState.ENDED, _CLOSING)
            return
        named = "" if isinstance(failure, AllspanError) else f"{type(failure).__name__}: "
        self.move(EngineState.FAILED, f"the engine of rank {self.rank} has failed: {named}{failure}")

    def close(self) -> None:
        """The step loop is to end; nothing changes once it has ended."""
        if not self.has_ended:
            self.move(EngineState.CLOSING, _CLOSING)

    def check_alive(self) -> None:
        """Raises Unavailable once the step loop has ended, or is about to."""
        if self.is_ending:
            raise Unavailable(self.cause)

    @property
    def accepts(self) -> bool:
        """True if requests are accepted."""
        return self.state is EngineState.RUNNING

    @property
    def has_ended(self) -> bool:
        """True once no further step comes."""
        return self.state in (EngineState.ENDED, EngineState.FAILED)

    @property
    def is_ending(self) -> bool:
        """True once the loops of all ranks have ended, or are to end with the next plan."""
        return self.state not in _ALIVE

    @property
    def report(self) -> str:
        """The state as statistics give it: "running", "stopped" (requests are refused) or "failed"."""
        if self.state is EngineState.FAILED:
            return "failed"
        return "running" if self.accepts else "stopped"
