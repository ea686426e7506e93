"""Collectives of a world of one rank: nothing to wait for, nothing to send."""

from __future__ import annotations

from torch import Tensor

from allspan.worker.parallel.base import PLAIN, ProgramOps


class LocalCollectives:
    """See `allspan.worker.parallel.base.Collectives`."""

    rank = 0
    size = 1
    capabilities = PLAIN

    def __init__(self, name: str = "tp") -> None:
        self.name = name
        self.program_ops: ProgramOps = {"all_reduce": self.all_reduce}

    def check(self) -> None:
        pass

    def all_reduce(self, x: Tensor) -> None:
        pass

    def exchange_rows(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        out.copy_(x)

    def all_gather_rows(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
