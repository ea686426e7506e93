"""AdapterTable: the leader's record of the loaded adapters, of the slots that they are in, and of who uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from allspan.protos.api.adapters import NO_ADAPTER, lost_adapter
from allspan.protos.api.errors import InternalError
from allspan.worker.scheduler.request import Request

MOST_PASSED_S = 2.0
"""A request that has waited so long for a slot holds up those behind it that have an adapter, until it gets one."""


@dataclass(slots=True)
class _Held:
    """One adapter, by its digest in the table."""

    slot: int = -1
    requests: int = 0
    """Requests that have not ended."""
    rows: int = 0
    """Requests among these that run."""
    last_used: int = 0
    is_loading: bool = False
    is_closing: bool = False
    is_dropping: bool = False


class AdapterTable:
    """Which adapter has which of `num_slots` slots. Pure Python: it counts, and moves nothing. Not thread-safe.

    An adapter stays in its slot until another one needs it, the one least recently used first; one that a running
    request has stays. What changes is told to the ranks with the next plan.
    """

    def __init__(self, num_slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_slots = num_slots
        self._clock = clock
        self.num_swaps = 0
        """Times that an adapter took another one's slot."""
        self._held: dict[int, _Held] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._uses = 0
        self._placements: list[tuple[int, int]] = []
        self._first: Request | None = None
        """A request that has waited too long for a slot."""
        self._num_closing = 0

    def __len__(self) -> int:
        """Adapters that take up a place: also those that were closed and still have requests."""
        return len(self._held)

    def __contains__(self, adapter: int) -> bool:
        """Whether it takes up a place."""
        return adapter in self._held

    def add(self, adapter: int, is_loading: bool = False) -> int:
        """Takes an adapter in and returns its slot, to which the caller brings it; -1: none is free, so that it gets
        one when a request needs it. One that is still loading has requests after `open`."""
        held = self._held[adapter] = _Held(is_loading=is_loading)
        if self._free:
            held.slot = self._free.pop()
        return held.slot

    def open(self, adapter: int) -> None:
        """All ranks have loaded it."""
        if adapter not in self._held:  # a follower's table learns of it now
            self.add(adapter)
        self._held[adapter].is_loading = False

    def close(self, adapter: int) -> int:
        """Refuses new requests for an adapter, and returns the number of those that still have it."""
        held = self._held[adapter]
        self._num_closing += not held.is_closing
        held.is_closing = True
        return held.requests

    def takes_requests(self, adapter: int) -> bool:
        held = self._held.get(adapter)
        return held is not None and not (held.is_loading or held.is_closing)

    def is_loading(self, adapter: int) -> bool:
        held = self._held.get(adapter)
        return held is not None and held.is_loading

    def take_unused(self) -> list[int]:
        """Returns the closed adapters that no request has any more, each once: they can be removed."""
        return [adapter for adapter in self._held if self.take_if_unused(adapter)] if self._num_closing else []

    def take_if_unused(self, adapter: int) -> bool:
        """Whether it is closed and no request has it any more; its caller, who alone is told so, has it removed."""
        held = self._held[adapter]
        if not held.is_closing or held.is_dropping or held.requests:
            return False
        held.is_dropping = True
        return True

    def remove(self, adapter: int) -> None:
        """Frees an adapter's slot. No request may have it; unknown ones are passed over."""
        held = self._held.pop(adapter, None)
        if held is None:
            return
        if held.requests:
            raise InternalError(f"adapter {adapter:#x} is removed while {held.requests} requests have it")
        self._num_closing -= held.is_closing
        if held.slot >= 0:
            self._free.append(held.slot)

    def admit(self, request: Request) -> None:
        """A request comes in. Raises AdapterNotFound for an adapter that is not there, or is closed."""
        if request.adapter == NO_ADAPTER:
            return
        if not self.takes_requests(request.adapter):
            raise lost_adapter(request.options.adapter)
        self._held[request.adapter].requests += 1

    def end(self, request: Request) -> None:
        """A request has ended, and runs no more."""
        if request.adapter != NO_ADAPTER:
            self._held[request.adapter].requests -= 1
            self._forget_first(request)

    def may_join(self, request: Request) -> bool:
        """Whether a waiting request's adapter has a slot, or there is one for it."""
        if request.adapter == NO_ADAPTER:
            return True
        first = self._first
        if first is not None and first is not request and _place(first) < _place(request):
            return False
        if self._held[request.adapter].slot >= 0 or self._free or self._evictable() is not None:
            return True
        if self._clock() - request.arrived_at > MOST_PASSED_S:
            self._first = request
        return False

    def join(self, request: Request) -> int:
        """A request runs from now on: returns its adapter's slot, -1 without one. `may_join` must have said yes just
        now."""
        if request.adapter == NO_ADAPTER:
            return -1
        held = self._held[request.adapter]
        if held.slot < 0:
            held.slot = self._free.pop() if self._free else self._evict()
            self._placements.append((held.slot, request.adapter))
        self._uses += 1
        held.rows, held.last_used = held.rows + 1, self._uses
        self._forget_first(request)
        return held.slot

    def leave(self, request: Request) -> None:
        """A running request has lost its row."""
        if request.adapter != NO_ADAPTER:
            self._held[request.adapter].rows -= 1

    def take_placements(self) -> tuple[tuple[int, int], ...]:
        """Returns what the next plan tells the ranks: slots, each with the digest of its new adapter."""
        if not self._placements:
            return ()
        placements, self._placements = tuple(self._placements), []
        return placements

    def check(self, open_requests: Iterable[Request]) -> None:
        """Raises InternalError unless slots and uses agree with the requests that have not ended."""
        taken = [held.slot for held in self._held.values() if held.slot >= 0]
        if sorted(taken + self._free) != list(range(self.num_slots)):
            raise InternalError(f"adapters are in the slots {taken}, {self._free} are free, of {self.num_slots}")
        found = {adapter: [0, 0] for adapter in self._held}
        for request in open_requests:
            if request.adapter != NO_ADAPTER:
                found[request.adapter][0] += 1
                found[request.adapter][1] += request.row >= 0
        counted = {adapter: [held.requests, held.rows] for adapter, held in self._held.items()}
        if counted != found:
            raise InternalError(f"requests and rows of adapters are counted as {counted}, and are {found}")

    def _evictable(self) -> int | None:
        """The adapter in a slot that no running request has, and that was not used for longest."""
        unused = [
            (held.last_used, adapter)
            for adapter, held in self._held.items()
            if held.slot >= 0 and not (held.rows or held.is_loading)
        ]
        return min(unused)[1] if unused else None

    def _evict(self) -> int:
        adapter = self._evictable()
        if adapter is None:
            raise InternalError("a request with an adapter joins, and no slot can be freed")
        held = self._held[adapter]
        slot, held.slot = held.slot, -1
        self.num_swaps += 1
        return slot

    def _forget_first(self, request: Request) -> None:
        if self._first is request:
            self._first = None


def _place(request: Request) -> tuple[int, int]:
    return request.options.priority, request.order
