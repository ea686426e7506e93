"""Collectives and the plan channel between ranks of one host, in memory that they share; the work is native code
(`kernels/cpu/runtime/window.h`, `plan_ring.h`), which describes the algorithms."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allspan.protos.api.errors import DeadlineExceeded, InternalError
from allspan.worker.parallel.base import GroupCapabilities, ProgramOps

MOST_WINDOW_BYTES = 16 << 20
SLOT_BYTES = (256 << 10, 16 << 10)
"""Most and least. A rank has four slots a thread; where they fill its second-level cache, the one that is written next
has left the peers' caches, and a long sum is twice as fast as with slots of 64 KiB."""
PLAN_SLOT_BYTES = 4096
SPINS = 200
"""Tries before waiting yields, some 10 µs: a peer that is later than that may need this very processor."""
PLAN_SPIN_S = 100e-6
"""A follower spins for the next plan this long before it sleeps: about what a leader takes between two steps."""


def load_native() -> Any | None:
    """The compiled module, or None where it was not built."""
    try:
        module = importlib.import_module("allspan.kernels.cpu._native")
    except ImportError:
        return None
    return module if hasattr(module, "PlanRing") else None


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The same zeroed bytes on every rank of a host. `address` is this process's, aligned to 64."""

    address: int
    rank: int
    size: int
    free: Callable[[], None]
    """Every rank calls it, once, at the end."""
    first: int = 0
    """What the host's first rank is called in messages: its number in the world, which the others' follow."""


def slot_bytes(size: int, threads: int) -> int:
    most, least = SLOT_BYTES
    fair = MOST_WINDOW_BYTES // (4 * size * threads)
    return min(most, max(least, fair // 4096 * 4096))


def bytes_needed(native: Any, size: int, threads: int) -> tuple[int, int]:
    """Bytes of shared memory for `size` ranks of `threads` threads, and how many of the first must be zero."""
    ring = int(native.PlanRing.bytes(size, PLAN_SLOT_BYTES))
    window = int(native.Window.bytes(size, threads, slot_bytes(size, threads)))
    return ring + window, ring + int(native.Window.bytes(size, threads, 0))


class WindowCollectives:
    """See `allspan.worker.parallel.base.Collectives`. Sums are the same bits on every rank."""

    def __init__(self, native: Any, memory: SharedMemory, threads: int, spins: int, timeout: float) -> None:
        """`threads`: threads that share an all-reduce inside a native run; the same number on every rank."""
        self.name = "tp"
        self.rank = memory.rank
        self.size = memory.size
        self._memory: SharedMemory | None = memory
        start = memory.address + native.PlanRing.bytes(memory.size, PLAN_SLOT_BYTES)
        slot = slot_bytes(memory.size, threads)
        self.window = native.Window(start, memory.rank, memory.size, threads, slot, spins, timeout, memory.first)
        self.capabilities = GroupCapabilities(window=self.window)
        self.program_ops: ProgramOps = {"all_reduce": self.all_reduce}

    def check(self) -> None:
        pass

    def all_reduce(self, x: Tensor) -> None:
        with deadline():
            self.window.all_reduce(pointer(x, (torch.float32,)), x.numel())

    def exchange_rows(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        m = x.shape[0]
        if x.shape[1] != widths[self.rank] or out.shape != (len(range(self.rank, m, self.size)), sum(widths)):
            raise InternalError(f"exchange_rows of {tuple(x.shape)} by {widths} into {tuple(out.shape)}")
        kinds = (torch.float32,)
        with deadline():
            self.window.exchange_rows(pointer(x, kinds), m, list(widths), pointer(out, kinds))

    def all_gather_rows(self, x: Tensor, out: Tensor) -> None:
        m, width = out.shape
        if x.shape != (len(range(self.rank, m, self.size)), width) or x.dtype != out.dtype:
            raise InternalError(f"all_gather_rows of {tuple(x.shape)} {x.dtype} into {tuple(out.shape)} {out.dtype}")
        kinds = (torch.float32, torch.int32)
        with deadline():
            self.window.all_gather_rows(pointer(x, kinds), m, width, pointer(out, kinds))

    def barrier(self) -> None:
        with deadline():
            self.window.barrier()

    def close(self) -> None:
        """Every rank calls it; the plan channel on the same memory ends with it."""
        if self._memory is not None:
            memory, self._memory = self._memory, None
            memory.free()


class WindowPlanChannel:
    """See `allspan.worker.parallel.base.PlanChannel`. A follower sleeps on a futex between plans."""

    def __init__(self, native: Any, memory: SharedMemory, spin: float, timeout: float) -> None:
        self._memory = memory  # the owner of the bytes must outlive the ring
        self._ring = native.PlanRing(
            memory.address, memory.rank, memory.size, PLAN_SLOT_BYTES, spin, timeout, memory.first
        )

    def publish(self, data: bytes) -> None:
        with deadline():
            self._ring.publish(data)

    def receive(self, timeout: float) -> bytes | None:
        """None also when a signal came, so that its handler runs."""
        with deadline():
            data: bytes | None = self._ring.receive(timeout)
        return data

    def expect(self) -> None:
        """The ring wakes it."""

    def close(self) -> None:
        pass


@contextmanager
def deadline() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise DeadlineExceeded(str(error)) from None


def pointer(x: Tensor, kinds: tuple[torch.dtype, ...]) -> int:
    if not x.is_contiguous() or x.dtype not in kinds or not x.is_cpu:
        raise InternalError(
            f"a collective needs contiguous {kinds}, not {x.dtype}, strides {x.stride()}, on {x.device}"
        )
    return x.data_ptr()
