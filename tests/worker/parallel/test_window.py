"""The window's algorithms, with threads for ranks: they release the interpreter's lock while they wait."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.protos.api.errors import DeadlineExceeded, InternalError
from allspan.worker.parallel import window
from allspan.worker.parallel.base import add_in_order
from allspan.worker.parallel.window import (
    SharedMemory,
    WindowCollectives,
    WindowPlanChannel,
    bytes_needed,
    load_native,
)

native: Any = load_native()
pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not installed")


@pytest.fixture(autouse=True, scope="module")
def small_slots() -> Iterator[None]:
    """Sums of a few hundred KB go round the slots several times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "SLOT_BYTES", (16 << 10, 16 << 10))
        yield


class Memory:
    """One zeroed buffer that all ranks of a test use."""

    def __init__(self, size: int, lanes: int = 1) -> None:
        needed, _ = bytes_needed(native, size, lanes)
        self.size = size
        self.lanes = lanes
        self.buffer = ctypes.create_string_buffer(needed + 64)
        self.address = -(-ctypes.addressof(self.buffer) // 64) * 64
        self.freed: list[int] = []

    def of(self, rank: int) -> SharedMemory:
        return SharedMemory(self.address, rank, self.size, lambda: self.freed.append(rank))

    def groups(self, timeout: float = 20.0) -> list[WindowCollectives]:
        return [WindowCollectives(native, self.of(rank), self.lanes, 0, timeout) for rank in range(self.size)]

    def channels(self, timeout: float = 20.0) -> list[WindowPlanChannel]:
        return [WindowPlanChannel(native, self.of(rank), 0.0, timeout) for rank in range(self.size)]


def on_every_rank(size: int, function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(function, rank) for rank in range(size)]]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 7), count=st.integers(1, 80_000), rounds=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_sums_are_in_the_order_of_the_tree_and_alike_on_every_rank(
    size: int, count: int, rounds: int, seed: int
) -> None:
    memory = Memory(size)
    groups = memory.groups()
    parts = torch.randn(rounds, size, count, generator=torch.Generator().manual_seed(seed)) * 1e3
    expected = add_in_order(list(parts.unbind(1)))

    def run(rank: int) -> torch.Tensor:
        sums = parts[:, rank].clone()
        for row in sums:
            groups[rank].all_reduce(row)
        return sums

    assert all(torch.equal(sums, expected) for sums in on_every_rank(size, run))


@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 9), widths=st.lists(st.integers(0, 30_000), min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_rows_go_to_their_rank_and_back_whatever_the_widths(m: int, widths: list[int], seed: int) -> None:
    size = len(widths)
    groups = Memory(size).groups()
    whole = torch.randn(m, sum(widths), generator=torch.Generator().manual_seed(seed))
    slices = [part.contiguous() for part in whole.split(widths, 1)]

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = torch.empty(len(range(rank, m, size)), sum(widths))
        groups[rank].exchange_rows(slices[rank], tuple(widths), mine)
        back = torch.empty_like(whole)
        groups[rank].all_gather_rows(mine, back)
        return mine, back

    for rank, (mine, back) in enumerate(on_every_rank(size, run)):
        assert torch.equal(mine, whole[rank::size])
        assert torch.equal(back, whole)


def runtimes(size: int, threads: int) -> list[Any]:
    return [native.Runtime("generic", threads, []) for _ in range(size)]


@settings(max_examples=10, deadline=None)
@given(
    size=st.integers(2, 3),
    threads=st.integers(1, 3),
    count=st.one_of(st.integers(1, 20_000), st.integers(1, 400_000)),
    rounds=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
def test_threads_of_a_run_share_a_sum_and_its_bits_are_one_threads(
    size: int, threads: int, count: int, rounds: int, seed: int
) -> None:
    groups = Memory(size, threads).groups()
    pools = runtimes(size, threads)
    parts = torch.randn(rounds, size, count, generator=torch.Generator().manual_seed(seed)) * 1e3
    expected = parts[:, 0].clone()
    for rank in range(1, size):
        expected += parts[:, rank]

    def run(rank: int) -> torch.Tensor:
        sums = parts[:, rank].clone()
        for row in sums:
            groups[rank].window.all_reduce(pools[rank], row.data_ptr(), count)
        # The lanes agree afterwards: one thread's collectives go on over the first.
        again = parts[0, rank].clone()
        groups[rank].all_reduce(again)
        return torch.cat([sums, again[None]])

    for sums in on_every_rank(size, run):
        assert torch.equal(sums, torch.cat([expected, expected[:1]]))


def test_ranks_with_more_threads_than_lanes_agree() -> None:
    memory = Memory(2, lanes=2)
    groups = memory.groups()
    pools = [native.Runtime("generic", threads, []) for threads in (2, 4)]
    parts = torch.randn(2, 100_000)

    def run(rank: int) -> torch.Tensor:
        x = parts[rank].clone()
        groups[rank].window.all_reduce(pools[rank], x.data_ptr(), x.numel())
        return x

    assert all(torch.equal(x, parts[0] + parts[1]) for x in on_every_rank(2, run))


def test_fewer_threads_than_lanes_are_refused() -> None:
    group = Memory(2, lanes=2).groups()[0]
    x = torch.zeros(5)
    with pytest.raises(ValueError, match="window of 2 lanes needs as many threads, not 1"):
        group.window.all_reduce(runtimes(1, 1)[0], x.data_ptr(), 5)


@pytest.mark.parametrize("count", [5, 100_000])
def test_all_threads_leave_a_run_whose_peer_does_not_come_and_the_window_stays_shut(count: int) -> None:
    group = Memory(3, lanes=4).groups(timeout=0.3)[0]
    pool = runtimes(1, 4)[0]
    x = torch.zeros(count)
    for patience in (20.0, 0.2):  # the second call does not wait again
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"rank 0 waited .* for rank 1, 2 in all_reduce"):
            group.window.all_reduce(pool, x.data_ptr(), count)
        assert time.monotonic() - started < patience
    with pytest.raises(DeadlineExceeded, match="for rank 1, 2 in all_reduce"):
        group.barrier()


def test_a_peer_that_leaves_within_a_long_sum_is_named() -> None:
    """Its first lane has come, its second never does: its threads are as many, but one lane's are not all there."""
    memory = Memory(2, lanes=2)
    groups = memory.groups(timeout=0.5)
    pool = runtimes(1, 2)[0]
    x = torch.zeros(300_000)

    def run(rank: int) -> str:
        try:
            if rank == 0:
                groups[0].window.all_reduce(pool, x.data_ptr(), x.numel())
            else:
                groups[1].all_reduce(torch.zeros(10))
        except (TimeoutError, DeadlineExceeded) as error:
            return str(error)
        return ""

    told = on_every_rank(2, run)
    assert "for rank 1 in all_reduce" in told[0]


def test_a_peer_that_does_not_come_is_named() -> None:
    groups = Memory(3).groups(timeout=0.2)
    with pytest.raises(DeadlineExceeded, match=r"rank 0 waited .* for rank 2 in all_reduce"):
        on_every_rank(2, lambda rank: groups[rank].all_reduce(torch.zeros(5)))


@pytest.mark.parametrize("bad", [torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]])
def test_a_tensor_of_another_kind_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(InternalError, match="contiguous"):
        Memory(1).groups()[0].all_reduce(bad)


def test_plans_of_any_length_arrive_in_order_also_at_a_slow_follower() -> None:
    channels = Memory(3).channels()
    plans = [b"", b"x", b"y" * 4096, b"z" * 4097, b"w" * 3_000_000, *(bytes([i % 256]) * (i % 50) for i in range(400))]

    def run(rank: int) -> list[bytes | None]:
        if rank == 0:
            for plan in plans:
                channels[0].publish(plan)
            return []
        received = []
        for i in range(len(plans)):
            if rank == 2 and i % 100 == 0:
                time.sleep(0.01)  # lags behind by more than the ring holds
            received.append(channels[rank].receive(20.0))
        return received

    _, first, second = on_every_rank(3, run)
    assert first == plans
    assert second == plans


def test_the_leader_gives_up_on_a_follower_that_is_a_whole_ring_behind() -> None:
    channels = Memory(3).channels(timeout=0.2)
    for _ in range(64):
        channels[0].publish(b"plan")
    with pytest.raises(DeadlineExceeded, match=r"rank 0 waited .* for rank 1, 2 in publish"):
        channels[0].publish(b"plan")


def test_a_waiting_follower_sleeps_until_the_plan_comes() -> None:
    channels = Memory(2).channels()
    assert channels[1].receive(0.0) is None
    asleep = threading.Event()

    def follow() -> tuple[float, bytes | None]:
        asleep.set()
        before = time.thread_time()
        plan = channels[1].receive(20.0)
        return time.thread_time() - before, plan

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(follow)
        asleep.wait(10)
        time.sleep(0.3)  # long enough to tell sleeping from spinning
        channels[0].publish(b"now")
        spent, plan = future.result(20)
    assert plan == b"now"
    assert spent < 0.1


def test_the_memory_is_freed_once() -> None:
    memory = Memory(1)
    group = memory.groups()[0]
    group.close()
    group.close()
    assert memory.freed == [0]
