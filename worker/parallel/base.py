"""What the engine needs of the other ranks of its world."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.int32]

ProgramOps = Mapping[str, Callable[..., None]]
"""Collective operations that a program may call, by the name of the op."""


@dataclass(frozen=True, slots=True)
class GroupCapabilities:
    """What the collectives of one group offer beyond the plain operations."""

    fused_norms: tuple[torch.dtype, ...] = ()
    """Dtypes that the program op `all_reduce_add_rms_norm` takes; none: the program keeps sum and norm apart."""
    is_capturable: bool = True
    """A device graph may be captured with the program ops in it."""
    window: Any = None
    """What sums in native code (a Window or HostSums), which a native program calls without Python; None: nothing."""
    pipe: Pipe | None = None
    """The way to the other stages of a pipeline; None: these ranks hold the whole model."""


PLAIN = GroupCapabilities()


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' parts, neighbours first: ((a + b) + (c + d)) + e. So the sum of a host's ranks, where each
    host has the same power of two of them, is the same whether they are on one host or each host adds its own."""
    sums = list(parts)
    while len(sums) > 1:
        odd = sums[-1:] if len(sums) % 2 else []
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)] + odd
    return sums[0]


class Collectives(Protocol):
    """Collective operations over one named group. Every rank calls the same ones in the same order, tokens or not.

    Each has a deadline; a peer that does not arrive raises DeadlineExceeded naming the ranks awaited.
    """

    name: str
    rank: int
    size: int

    @property
    def capabilities(self) -> GroupCapabilities: ...

    @property
    def program_ops(self) -> ProgramOps:
        """`all_reduce`, and where the ranks have them `all_reduce_add_rms_norm` and `all_gather_columns`."""

    def check(self) -> None:
        """Raises what an earlier call could not, as its work went on after it had returned."""

    def all_reduce(self, x: Tensor) -> None:
        """Sums the contiguous float32 `x` over the ranks, in place, in the order of `add_in_order` but
        for GPUs."""

    def exchange_rows(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        """Gives each rank whole rows: x [m, widths[rank]] is this rank's column slice of m rows; out [m_rank,
        sum(widths)] gets rows rank, rank + size, rank + 2·size … (m_rank of them), the slices side by side. float32."""

    def all_gather_rows(self, x: Tensor, out: Tensor) -> None:
        """The way back: row j of `x` [m_rank, w] on rank r becomes row r + j·size of `out` [m, w] everywhere. float32
        or int32."""

    def barrier(self) -> None: ...

    def close(self) -> None: ...


class Pipe(Protocol):
    """The way from one stage of a pipeline to the others, between ranks of equal number within their stages. Messages
    of a kind arrive in the order in which they were sent; each call has a deadline and raises DeadlineExceeded.
    """

    stage: int
    num_stages: int

    @property
    def whole(self) -> Collectives:
        """Collectives over the ranks of all stages, in host memory; rank 0 is the leader."""

    def send(self, x: Tensor) -> None:
        """Hands a copy of the contiguous float32 `x` to the next stage, and returns."""

    def receive(self, out: Tensor) -> None:
        """Fills the contiguous float32 `out` with what the stage before has sent."""

    def give(self, words: Words) -> None:
        """Last stage: hands what a step has made to every other stage, and returns."""

    def take(self, count: int) -> Words:
        """Another stage: the `count` words of the oldest step that has not been taken."""


def all_ranks(collectives: Collectives) -> Collectives:
    """Returns the collectives over the ranks of all stages: these ones, where they hold the whole model."""
    pipe = collectives.capabilities.pipe
    return pipe.whole if pipe is not None else collectives


class PlanChannel(Protocol):
    """Carries each step's plan from the leader (rank 0) to every follower, in order."""

    def publish(self, data: bytes) -> None:
        """Leader: hands over the next plan; waits (bounded) while a follower is a whole ring behind."""

    def receive(self, timeout: float) -> bytes | None:
        """Follower: the next plan, sleeping until it comes; None after `timeout` seconds without one."""

    def expect(self) -> None:
        """Follower, from any thread: a plan comes soon, and `receive` had better notice at once."""

    def close(self) -> None: ...
