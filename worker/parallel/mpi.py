"""Collectives and the plan channel over plain MPI: between hosts, and wherever the window cannot be had.

Upper-case buffer calls only (the lower-case ones pickle). Everything is non-blocking and tested until its deadline.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from allspan.protos.api.errors import DeadlineExceeded, InternalError
from allspan.worker.parallel.base import PLAIN, ProgramOps, add_in_order

_TYPES = {torch.float32: MPI.FLOAT, torch.int32: MPI.INT32_T}
_SPINS = 200
_YIELD_S = 0.002
_LONGEST_SLEEP_S = 0.002
_NAP_S = 2e-5
_ALERT_S = 0.02
"""How long a wait that was woken naps instead of sleeping."""


def wait(request: Any, timeout: float, what: str, comm: Any) -> None:
    """Waits for a request: tries a while, then yields, then sleeps. DeadlineExceeded after `timeout` seconds."""
    if not poll(request, timeout):
        peers = ", ".join(str(rank) for rank in range(comm.size) if rank != comm.rank)
        raise DeadlineExceeded(f"rank {comm.rank} waited {timeout:g} s for rank {peers} in {what}")


def poll(request: Any, timeout: float, expected: threading.Event | None = None) -> bool:
    """Whether a request completes within `timeout` seconds. Setting `expected` wakes one that sleeps."""
    for _ in range(_SPINS):
        if request.Test():
            return True
    start, alert_until = time.monotonic(), 0.0
    while not request.Test():
        now = time.monotonic()
        waited = now - start
        if waited > timeout:
            return False
        pause = _NAP_S if now < alert_until else min(waited / 8, _LONGEST_SLEEP_S)
        if waited < _YIELD_S:
            os.sched_yield()
        elif expected is None or now < alert_until:
            time.sleep(pause)
        elif expected.wait(pause):
            expected.clear()
            alert_until = time.monotonic() + _ALERT_S
    return True


class MpiCollectives:
    """See `allspan.worker.parallel.base.Collectives`. Sums are the same bits on every rank."""

    capabilities = PLAIN

    def __init__(self, comm: Any, timeout: float, name: str = "tp") -> None:
        self.name = name
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm = comm
        self._timeout = timeout
        self.program_ops: ProgramOps = {"all_reduce": self.all_reduce}

    def check(self) -> None:
        pass

    def all_reduce(self, x: Tensor) -> None:
        """Every rank gets all parts and adds them itself: MPI's own sums differ with their length."""
        parts = torch.empty(self.size, *x.shape)
        self._wait(self._comm.Iallgather([_array(x), MPI.FLOAT], [_array(parts), MPI.FLOAT]), "all_reduce")
        x.copy_(add_in_order(list(parts)))

    def exchange_rows(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        m, width = x.shape
        mine = self._rows(m, self.rank)
        send = torch.cat([x[rank :: self.size].reshape(-1) for rank in range(self.size)])
        received = torch.empty(mine * sum(widths))
        send_counts = [self._rows(m, rank) * width for rank in range(self.size)]
        counts = [mine * w for w in widths]
        request = self._comm.Ialltoallv(
            [_array(send), (send_counts, _starts(send_counts)), MPI.FLOAT],
            [_array(received), (counts, _starts(counts)), MPI.FLOAT],
        )
        self._wait(request, "exchange_rows")
        column = 0
        for part, part_width in zip(torch.split(received, counts), widths, strict=True):
            out[:, column : column + part_width] = part.view(mine, part_width)
            column += part_width

    def all_gather_rows(self, x: Tensor, out: Tensor) -> None:
        m, width = out.shape
        counts = [self._rows(m, rank) * width for rank in range(self.size)]
        received = torch.empty(m * width, dtype=out.dtype)
        kind = _TYPES[out.dtype]
        target = [_array(received), (counts, _starts(counts)), kind]
        self._wait(self._comm.Iallgatherv([_array(x), kind], target), "all_gather_rows")
        for rank, part in enumerate(torch.split(received, counts)):
            out[rank :: self.size] = part.view(-1, width)

    def barrier(self) -> None:
        self._wait(self._comm.Ibarrier(), "barrier")

    def close(self) -> None:
        pass

    def _rows(self, m: int, rank: int) -> int:
        return len(range(rank, m, self.size))

    def _wait(self, request: Any, what: str) -> None:
        wait(request, self._timeout, what, self._comm)


class MpiPlanChannel:
    """See `allspan.worker.parallel.base.PlanChannel`. A plan is one message to each follower: its length, then its
    first bytes; what does not fit follows in a second one. Every 64 plans a barrier, left running meanwhile, bounds how
    far the leader runs ahead.
    """

    _INLINE = 1992
    """The bytes of a message that is sent without a handshake: the other side may sleep, and a broadcast would wait."""
    _HEADER = 8
    _FENCE_EVERY = 64

    def __init__(self, comm: Any, timeout: float) -> None:
        self._comm = comm
        self._timeout = timeout
        self._buffer = np.zeros(self._HEADER + self._INLINE, dtype=np.uint8)
        self._pending: Any = None
        self._fence: Any = None
        self._count = 0
        self._expected = threading.Event()

    def publish(self, data: bytes) -> None:
        self._send(len(data).to_bytes(self._HEADER, "little") + data[: self._INLINE])
        if len(data) > self._INLINE:
            self._send(data[self._INLINE :])
        self._advance()

    def receive(self, timeout: float) -> bytes | None:
        if self._pending is None:
            self._pending = self._comm.Irecv([self._buffer, MPI.BYTE], source=0)
        if not poll(self._pending, timeout, self._expected):
            return None
        self._pending = None
        length = int.from_bytes(self._buffer[: self._HEADER].tobytes(), "little")
        data = self._buffer[self._HEADER : self._HEADER + min(length, self._INLINE)].tobytes()
        if length > self._INLINE:
            rest = np.empty(length - self._INLINE, dtype=np.uint8)
            wait(self._comm.Irecv([rest, MPI.BYTE], source=0), self._timeout, "receive", self._comm)
            data += rest.tobytes()
        self._advance()
        return data

    def expect(self) -> None:
        self._expected.set()

    def close(self) -> None:
        """Only after the last plan was received everywhere."""
        if self._fence is not None:
            wait(self._fence, self._timeout, "close", self._comm)
            self._fence = None

    def _send(self, data: bytes) -> None:
        message = [np.frombuffer(data, dtype=np.uint8), MPI.BYTE]
        for request in [self._comm.Isend(message, dest=rank) for rank in range(1, self._comm.size)]:
            wait(request, self._timeout, "publish", self._comm)

    def _advance(self) -> None:
        self._count += 1
        if self._count % self._FENCE_EVERY == 0:
            self.close()
            self._fence = self._comm.Ibarrier()


def _array(x: Tensor) -> Any:
    if not x.is_contiguous() or x.dtype not in _TYPES:
        raise InternalError(f"a collective needs contiguous float32 or int32, not {x.dtype} with strides {x.stride()}")
    return x.numpy()


def _starts(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]
