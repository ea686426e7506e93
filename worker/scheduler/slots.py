"""Slots: the fixed rows of a batch, one for each running request."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.worker.scheduler.plan import Run
from allspan.worker.scheduler.request import Request


class Slots:
    """Gives out row numbers, the lowest first at the start, then the one that became free last."""

    def __init__(self, count: int) -> None:
        self.requests: list[Request | None] = [None] * count
        """The request of each row."""
        self.decodes: Sequence[Run] = [Run(row, 1) for row in range(count)]
        """One token of each row: made once, as most runs are such."""
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def free(self) -> Sequence[int]:
        return self._free

    def take(self, request: Request) -> None:
        """Sets `request.row`. A row must be free."""
        request.row = self._free.pop()
        self.requests[request.row] = request

    def give_back(self, request: Request) -> None:
        self.requests[request.row] = None
        self._free.append(request.row)
        request.row = -1
