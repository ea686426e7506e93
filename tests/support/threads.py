"""A world whose ranks are threads of this process: Collectives and PlanChannels without MPI, for tests above them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from allspan.protos.api.errors import DeadlineExceeded, InternalError
from allspan.worker.parallel.base import PLAIN, GroupCapabilities, ProgramOps


class ThreadWorld:
    """`collectives[r]` and `channels[r]` belong to rank r; `run(f)` calls f(r) on a thread a rank and returns results.

    Sums are taken in rank order. A rank that fails breaks the barrier, so that its peers fail too instead of waiting.
    """

    def __init__(self, size: int, timeout: float = 20.0) -> None:
        self.size = size
        self.timeout = timeout
        self.collectives: Sequence[ThreadCollectives] = [ThreadCollectives(self, rank) for rank in range(size)]
        self._queues: list[queue.Queue[bytes]] = [queue.Queue(maxsize=64) for _ in range(size)]
        self.channels = [ThreadPlanChannel(rank, self._queues, timeout) for rank in range(size)]
        self.barrier = threading.Barrier(size)
        self.shared: list[Tensor | None] = [None] * size

    def run(self, function: Callable[[int], Any], timeout: float = 120.0) -> list[Any]:
        """Raises the first error that is not merely a peer's broken barrier."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        if errors:
            raise next((error for error in errors if not isinstance(error, DeadlineExceeded)), errors[0])
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"ranks still run after {timeout} s")
        return results


class ThreadCollectives:
    """See `allspan.worker.parallel.base.Collectives`."""

    capabilities = PLAIN

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.name = "tp"
        self.rank = rank
        self.size = world.size
        self._world = world
        self.program_ops: ProgramOps = {"all_reduce": self.all_reduce}

    def check(self) -> None:
        pass

    def all_reduce(self, x: Tensor) -> None:
        parts = self._share(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        self.barrier()
        x.copy_(total)

    def exchange_rows(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        if x.shape[1] != widths[self.rank] or out.shape[1] != sum(widths):
            raise InternalError(f"exchange_rows: x {tuple(x.shape)}, out {tuple(out.shape)}, widths {widths}")
        column = 0
        for part, width in zip(self._share(x), widths, strict=True):
            out[:, column : column + width] = part[self.rank :: self.size]
            column += width
        self.barrier()

    def all_gather_rows(self, x: Tensor, out: Tensor) -> None:
        for rank, part in enumerate(self._share(x)):
            out[rank :: self.size] = part
        self.barrier()

    def barrier(self) -> None:
        try:
            self._world.barrier.wait(self._world.timeout)
        except threading.BrokenBarrierError:
            raise DeadlineExceeded(f"rank {self.rank}: a peer did not arrive within {self._world.timeout} s") from None

    def close(self) -> None:
        pass

    def _share(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, once all have arrived; the caller ends with a barrier before anyone writes its own."""
        self._world.shared[self.rank] = x
        self.barrier()
        return [part for part in self._world.shared if part is not None]


class FusingCollectives(ThreadCollectives):
    """With what ranks on GPUs have besides; see `allspan.worker.backend.cuda.collectives.GpuCollectives`."""

    capabilities = GroupCapabilities(fused_norms=(torch.float32,))

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.fused = 0
        self.steps = 0
        self.program_ops = {
            **self.program_ops,
            "all_reduce_add_rms_norm": self.all_reduce_add_rms_norm,
            "all_gather_columns": self.all_gather_columns,
        }

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self.fused += 1
        self.all_reduce(x)
        residual += x
        out.copy_(residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + eps) * weight)

    def all_gather_columns(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        assert x.shape[1] == widths[self.rank]
        out.copy_(torch.cat(self._share(x), 1))
        self.barrier()

    def check(self) -> None:
        self.steps += 1


class ThreadPlanChannel:
    """See `allspan.worker.parallel.base.PlanChannel`."""

    def __init__(self, rank: int, queues: list[queue.Queue[bytes]], timeout: float) -> None:
        self._rank = rank
        self._queues = queues
        self._timeout = timeout
        self.num_expected = 0

    def publish(self, data: bytes) -> None:
        for follower in self._queues[1:]:
            try:
                follower.put(data, timeout=self._timeout)
            except queue.Full:
                raise DeadlineExceeded(f"a follower is {follower.maxsize} plans behind") from None

    def receive(self, timeout: float) -> bytes | None:
        try:
            return self._queues[self._rank].get(timeout=timeout)
        except queue.Empty:
            return None

    def expect(self) -> None:
        self.num_expected += 1

    def close(self) -> None:
        pass
