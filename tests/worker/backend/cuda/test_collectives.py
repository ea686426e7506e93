"""How ranks with a GPU each come to their collectives, with played memory: what all can have, or the next best."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.comm import ipc
from allspan.kernels.errors import BackendUnavailable
from allspan.protos.api.errors import DeadlineExceeded
from allspan.worker.backend.cuda import collectives as gpu_collectives
from allspan.worker.backend.cuda.collectives import GpuCollectives, join_gpus
from allspan.worker.backend.cuda.staged import StagedCollectives
from support.threads import ThreadWorld


class Host:
    """Collectives of ranks that are threads; counts what goes through it."""

    name = "tp"

    def __init__(self, rank: int, size: int, meeting: threading.Barrier) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting
        self.calls: list[str] = []

    def all_reduce(self, x: Tensor) -> None:
        self.calls.append("all_reduce")

    def exchange_rows(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        self.calls.append("exchange_rows")

    def all_gather_rows(self, x: Tensor, out: Tensor) -> None:
        self.calls.append("all_gather_rows")

    def barrier(self) -> None:
        self._meeting.wait(10)

    def close(self) -> None:
        self.calls.append("close")


class Played:
    """Memory of GPUs, and NCCL: what is taken, open and freed. `fails` are the ranks that cannot."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meeting = threading.Barrier(size)
        self.told: dict[int, bytes] = {}
        self.events: list[tuple[str, int]] = []
        self.rank = threading.local()

    def take(self, fails: int) -> Callable[..., ipc.OwnMemory]:
        def take(parts: tuple[tuple[int, int], ...]) -> ipc.OwnMemory:
            rank = self.rank.value
            if rank == fails:
                raise BackendUnavailable("no room")
            self.events.append(("take", rank))
            return ipc.OwnMemory(rank << 32, bytes([rank + 1]) * 64, lambda: self.events.append(("free", rank)))

        return take

    def open_memory(self, fails: int) -> Callable[[bytes], tuple[int, Callable[[], None]]]:
        def open_memory(handle: bytes) -> tuple[int, Callable[[], None]]:
            rank = self.rank.value
            if rank == fails:
                raise BackendUnavailable("no way there")
            self.events.append(("open", rank))
            return (handle[0] - 1) << 32, lambda: self.events.append(("close", rank))

        return open_memory

    def join(self, nccl: Any = None) -> list[tuple[GpuCollectives, str, str]]:
        """Of all ranks at once."""

        def run(rank: int) -> tuple[GpuCollectives, str, str]:
            self.rank.value = rank

            def share(data: bytes) -> list[bytes]:
                self.told[rank] = data
                self.meeting.wait(10)
                everyone = [self.told[each] for each in range(self.size)]
                self.meeting.wait(10)
                return everyone

            return join_gpus(Host(rank, self.size, self.meeting), share, 5.0, nccl=lambda *arguments: nccl)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(run, range(self.size)))


class Ends:
    """Stands for `AllReduce`."""

    def __init__(self, rank: int, addresses: list[int], device: str, timeout_s: float = 0.0) -> None:
        self.addresses = addresses
        self.given_up: int | None = None


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Played]:
    def play(take_fails: int = -1, open_fails: int = -1, size: int = 3) -> Played:
        played = Played(size)
        monkeypatch.setattr(ipc, "take", played.take(take_fails))
        monkeypatch.setattr(ipc, "open_memory", played.open_memory(open_fails))
        monkeypatch.setattr(gpu_collectives, "AllReduce", Ends)
        return played

    return play


def test_ranks_that_reach_each_other_open_all_arenas(played: Callable[..., Played]) -> None:
    joined = played().join()
    assert [(kind, why_not) for _, kind, why_not in joined] == [("ipc", "")] * 3
    for collectives, _, _ in joined:
        direct: Any = collectives._direct
        assert direct.addresses == [0, 1 << 32, 2 << 32]


@pytest.mark.parametrize(
    ("failing", "reason"),
    [({"take_fails": 1}, "no room"), ({"open_fails": 2}, "no way there"), ({"size": 9}, "more than 8")],
)
def test_where_one_cannot_none_does_and_nothing_is_kept(
    failing: dict[str, int], reason: str, played: Callable[..., Played]
) -> None:
    world = played(**failing)
    assert all(kind == "staged" and reason in why_not for _, kind, why_not in world.join())
    assert sum(name == "take" for name, _ in world.events) == sum(name == "free" for name, _ in world.events)
    assert sum(name == "open" for name, _ in world.events) == sum(name == "close" for name, _ in world.events)
    last_close = max((i for i, (name, _) in enumerate(world.events) if name == "close"), default=-1)
    assert all(i > last_close for i, (name, _) in enumerate(world.events) if name == "free"), "freed while it is open"


def test_nccl_is_the_next_best(played: Callable[..., Played]) -> None:
    joined = played(take_fails=0).join(nccl=object())
    assert [kind for _, kind, _ in joined] == ["nccl"] * 3


def test_a_peer_that_was_given_up_is_named_at_the_next_exchange(played: Callable[..., Played]) -> None:
    collectives = played().join()[1][0]
    ids = torch.zeros(1, 1, dtype=torch.int32)
    collectives.all_gather_rows(ids, ids)
    direct: Any = collectives._direct
    direct.given_up = 2
    with pytest.raises(DeadlineExceeded, match="the GPU of rank 1 waited too long for rank 2"):
        collectives.all_gather_rows(ids, ids)


def test_tensors_of_the_host_are_summed_there(played: Callable[..., Played]) -> None:
    collectives = played().join()[0][0]
    collectives.all_reduce(torch.zeros(2))
    host: Any = collectives._host
    assert host._inner.calls == ["all_reduce"]


def test_16_bit_elements_that_go_through_the_host_are_summed_in_float32() -> None:
    world = ThreadWorld(3)

    def on_rank(rank: int) -> list[float]:
        x = torch.tensor([1.0, 256.0 if rank == 0 else 0.5], dtype=torch.bfloat16)
        StagedCollectives(world.collectives[rank]).all_reduce(x)
        assert x.dtype is torch.bfloat16
        return x.tolist()

    assert world.run(on_rank) == [[3.0, 256.0]] * 3, "rounded once: 257 is no bfloat16"
