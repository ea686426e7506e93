"""WaitingQueue: requests that wait for a row, in the order in which they get one; and their deadlines."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

from allspan.worker.scheduler.request import Request

_SLACK = 64


class WaitingQueue:
    """Waiting requests by priority (lower first), then by arrival: a preempted one comes back to its old place."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []  # arrivals differ, so that requests are never compared

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Request:
        return self._entries[index][2]

    def add(self, request: Request) -> None:
        insort(self._entries, (request.options.priority, request.order, request))

    def remove(self, request: Request) -> None:
        """It must be here."""
        del self._entries[bisect_left(self._entries, (request.options.priority, request.order, request))]

    def requests(self) -> list[Request]:
        return [request for _, _, request in self._entries]


class Deadlines:
    """The deadlines of requests. Costs nothing where no request has one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bytes]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, request: Request, deadline: float) -> None:
        heapq.heappush(self._heap, (deadline, request.order, request.request_id))

    def pop_expired(self, now: float, open_requests: dict[bytes, Request]) -> list[Request]:
        """Returns the requests of `open_requests` whose time is over."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, order, request_id = heapq.heappop(self._heap)
            request = open_requests.get(request_id)
            if request is not None and request.order == order:  # an id may be used again
                expired.append(request)
        if len(self._heap) > 2 * len(open_requests) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in open_requests]
            heapq.heapify(self._heap)
        return expired
