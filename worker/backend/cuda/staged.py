"""Collectives for tensors that lie on a device, through copies in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.worker.backend.cuda.event_wait import DEFAULT_WAITER, EventWaiter
from allspan.worker.parallel.base import PLAIN, Collectives, ProgramOps


class StagedCollectives:
    """See `allspan.worker.parallel.base.Collectives`; `inner` works on host memory. Whoever's GPU hangs raises
    DeadlineExceeded."""

    capabilities = PLAIN

    def __init__(self, inner: Collectives, waiter: EventWaiter = DEFAULT_WAITER) -> None:
        self.name = inner.name
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._waiter = waiter
        self.program_ops: ProgramOps = {"all_reduce": self.all_reduce}

    def check(self) -> None:
        pass

    def all_reduce(self, x: Tensor) -> None:
        """Sums `x` over the ranks; the sum of 16-bit elements is rounded once."""
        host = self._waiter.to_host(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x)
        self._inner.all_reduce(host)
        x.copy_(host)

    def exchange_rows(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        host = out if out.is_cpu else torch.empty_like(out, device="cpu")
        self._inner.exchange_rows(self._waiter.to_host(x), widths, host)
        out.copy_(host)

    def all_gather_rows(self, x: Tensor, out: Tensor) -> None:
        host = out if out.is_cpu else torch.empty_like(out, device="cpu")
        self._inner.all_gather_rows(self._waiter.to_host(x), host)
        out.copy_(host)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()
