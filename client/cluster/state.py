"""The states of a replica as its client sees it: one enum, the transitions between its members, and their causes."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping


class ReplicaState(enum.Enum):
    """The states of a replica for its client."""

    CONNECTING = "connecting"
    """Connections to the ranks of an epoch are being opened."""
    READY = "ready"
    """Every rank sends heartbeats and the model takes requests."""
    HELD = "held"
    """Every rank sends heartbeats, but the leader admits no request (a stopped model) or its step loop stands still."""
    SILENT = "silent"
    """A rank is connected and has sent nothing for a while."""
    LOST = "lost"
    """A rank of the epoch is gone; the cause is being looked up."""
    DOWN = "down"
    """No epoch runs; another one is looked for."""
    STOPPED = "stopped"
    """No epoch runs, and no source reports that another one will be started."""
    CLOSED = "closed"
    """This client has closed its connections for good."""

    @property
    def has_world(self) -> bool:
        """True while the ranks of an epoch are connected."""
        return self in (ReplicaState.READY, ReplicaState.HELD, ReplicaState.SILENT)

    @property
    def takes_requests(self) -> bool:
        """True if requests may be sent; a HELD replica refuses them itself."""
        return self in (ReplicaState.READY, ReplicaState.HELD)

    @property
    def may_return(self) -> bool:
        """True if a request that found no epoch may wait for one."""
        return self not in (ReplicaState.STOPPED, ReplicaState.CLOSED)


_S = ReplicaState
_CONNECTED = frozenset((_S.READY, _S.HELD, _S.SILENT))
_AFTER_LOSS = frozenset((_S.DOWN, _S.STOPPED))

TRANSITIONS: Mapping[ReplicaState, frozenset[ReplicaState]] = {
    _S.CONNECTING: _CONNECTED | _AFTER_LOSS | {_S.CLOSED},
    _S.READY: frozenset((_S.HELD, _S.SILENT, _S.LOST, _S.CLOSED)),
    _S.HELD: frozenset((_S.READY, _S.SILENT, _S.LOST, _S.CLOSED)),
    _S.SILENT: frozenset((_S.READY, _S.HELD, _S.LOST, _S.CLOSED)),
    _S.LOST: _AFTER_LOSS | {_S.CLOSED},
    _S.DOWN: frozenset((_S.CONNECTING, _S.STOPPED, _S.CLOSED)),
    _S.STOPPED: frozenset((_S.CONNECTING, _S.DOWN, _S.CLOSED)),
    _S.CLOSED: frozenset(),
}
"""The states that may follow each state. Every state may also follow itself, with a newer cause."""


class IllegalTransition(RuntimeError):
    """A state was to follow one that it cannot follow, or without the cause that it needs."""


class ReplicaStatus:
    """The present state of one replica and its cause.

    `cause`: why it is not READY, in one line; "" exactly while it is READY.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the answer of a query below may have changed."""
        self.state = ReplicaState.DOWN
        self.cause = "not attached to a cluster"
        self._on_change = on_change
        self._moved = asyncio.Event()

    @property
    def down_cause(self) -> str:
        """The reason why no request can be sent; "" while requests can be sent."""
        return "" if self.state.takes_requests else self.cause

    def move(self, state: ReplicaState, cause: str | None = None) -> bool:
        """Enters a state; returns whether it is another one. `cause` None keeps the cause. Raises IllegalTransition."""
        before = self.state
        cause = self.cause if cause is None else cause
        if state is not before and state not in TRANSITIONS[before]:
            raise IllegalTransition(f"a replica that is {before.value} cannot become {state.value} ({cause})")
        if bool(cause) == (state is ReplicaState.READY):
            raise IllegalTransition(f"a replica that is {state.value} has the cause {cause!r}")
        self.state, self.cause = state, cause
        if state is before:
            return False
        self._moved.set()
        self._moved = asyncio.Event()
        if _answers(before) != _answers(state):
            self._on_change()
        return True

    async def until_not(self, state: ReplicaState) -> None:
        """Returns once the replica is in another state."""
        while self.state is state:
            await self._moved.wait()


def _answers(state: ReplicaState) -> tuple[bool, ...]:
    return state.has_world, state.takes_requests, state is ReplicaState.READY, state.may_return
