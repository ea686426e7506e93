"""What the ranks of a test's world do: `mpirun … python mpi_checks.py CHECK COLLECTIVES [--hosts 2,2]`, the
latter to take so many ranks for those of a host. Prints "ok" on rank 0."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch

from allspan.protos.api.errors import DeadlineExceeded
from allspan.protos.config.settings import ParallelConfig
from allspan.worker.parallel.base import Collectives, add_in_order
from allspan.worker.parallel.hosts import by_shared_memory
from allspan.worker.parallel.window import load_native
from allspan.worker.parallel.world import World, join_world

ALL_REDUCE_SIZES = (1, 3, 576, 577, 16384, 16385, 100_003, 1_500_000)
PLAN_SIZES = (0, 1, 100, 1991, 1992, 1993, 4095, 4096, 4097, 70_000, 900_000)


def host_ranks(size: int) -> list[range]:
    """The ranks of each host of a world of `size`."""
    if "--hosts" not in sys.argv:
        return [range(size)]
    sizes = [int(each) for each in sys.argv[sys.argv.index("--hosts") + 1].split(",")]
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def by_argument(_: Any, comm: Any) -> Any:
    host = next(i for i, ranks in enumerate(host_ranks(comm.size)) if comm.rank in ranks)
    return comm.Split(host, comm.rank)


def slices(group: Collectives, seed: int, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Every rank's tensor of a collective, the same on each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check_all_reduce(world: World) -> None:
    group = world.groups["tp"]
    for size in ALL_REDUCE_SIZES:
        for repeat in range(3 if size < 100_000 else 1):
            parts = slices(group, size + repeat, [(size,)] * group.size)
            x = parts[group.rank].clone()
            group.all_reduce(x)
            expected = add_in_order([add_in_order(parts[ranks[0] : ranks[-1] + 1]) for ranks in host_ranks(group.size)])
            assert torch.equal(x, expected), f"all_reduce of {size} differs from the sum of the tree"
            if {len(ranks) for ranks in host_ranks(group.size)} in ({1}, {2}, {4}):
                assert torch.equal(x, add_in_order(parts)), f"all_reduce of {size} differs from that on one host"
            exact = torch.stack(parts).double().sum(0)
            torch.testing.assert_close(x.double(), exact, rtol=1e-5, atol=1e-5)


def check_batches(world: World) -> None:
    """A row's sum has the same bits in any batch and on the threads of a program's run; NaN and infinity stay in
    theirs; no rows are a sum, too."""
    group = world.groups["tp"]
    parts = slices(group, 7, [(301, 577)] * group.size)
    for part in parts:
        part[3] = 0.0
        part[4, 5] = float("nan")
        part[5, 6] = float("inf")
    whole = parts[group.rank].clone()
    group.all_reduce(whole)
    assert (whole[3] == 0).all()
    assert whole[4].isnan().sum() == 1
    assert whole[5, 6] == float("inf")
    for first, last in ((0, 1), (4, 7), (17, 48), (300, 301), (9, 9)):
        rows = parts[group.rank][first:last].clone()
        group.all_reduce(rows)
        assert torch.equal(rows.view(torch.int32), whole[first:last].view(torch.int32)), f"rows {first} to {last}"
    native: Any = load_native()
    if group.capabilities.window is not None:
        runtime = native.Runtime("generic", 2, [])
        for rows in (parts[group.rank].clone(), parts[group.rank][:1].clone()):
            group.capabilities.window.all_reduce(runtime, rows.data_ptr(), rows.numel())
            assert torch.equal(rows.view(torch.int32), whole[: len(rows)].view(torch.int32)), (
                f"a run's {len(rows)} rows"
            )


def check_rows(world: World) -> None:
    group = world.groups["tp"]
    for m, base in ((1, 3), (2, 5), (7, 1), (5, 40_001), (64, 333)):
        widths = tuple(base + rank * 2 for rank in range(group.size))
        parts = slices(group, m * base, [(m, width) for width in widths])
        whole = torch.cat(parts, 1)
        mine = torch.empty(len(range(group.rank, m, group.size)), sum(widths))
        group.exchange_rows(parts[group.rank], widths, mine)
        assert torch.equal(mine, whole[group.rank :: group.size]), f"exchange_rows of {m} rows by {widths}"
        gathered = torch.empty_like(whole)
        group.all_gather_rows(mine, gathered)
        assert torch.equal(gathered, whole), f"all_gather_rows of {m} rows by {widths}"
        ids = torch.arange(m * 3, dtype=torch.int32).view(m, 3)
        gathered_ids = torch.empty_like(ids)
        group.all_gather_rows(ids[group.rank :: group.size].contiguous(), gathered_ids)
        assert torch.equal(gathered_ids, ids), f"all_gather_rows of {m} rows of int32"


def check_plans(world: World) -> None:
    channel = world.channel
    assert channel is not None
    plans = [bytes([size % 251]) * size for size in PLAN_SIZES] + [i.to_bytes(4, "little") for i in range(500)]
    if world.rank == 0:
        for plan in plans:
            channel.publish(plan)
    else:
        for i, plan in enumerate(plans):
            if i % 100 == 50 and world.rank == 1:
                time.sleep(0.02)  # a follower that lags
            assert channel.receive(30.0) == plan, f"plan {i} of {len(plan)} bytes"
        assert channel.receive(0.0 if world.kind == "window" else 0.01) is None
    world.groups["tp"].barrier()


def check_idle(world: World) -> None:
    """Waiting for a plan costs next to no processor time, and ends when one comes."""
    channel = world.channel
    assert channel is not None
    if world.rank == 0:
        time.sleep(1.0)
        channel.publish(b"wake")
    else:
        before = time.process_time()
        assert channel.receive(0.3) is None
        assert channel.receive(30.0) == b"wake"
        spent = time.process_time() - before
        assert spent < 0.25, f"an idle follower spent {spent:.3f} s of processor time in 1 s"


def check_expected(world: World) -> None:
    """Over MPI: who expects a plan naps."""
    from allspan.worker.parallel import mpi

    channel = world.channel
    assert channel is not None
    if world.rank == 0:
        time.sleep(0.5)
        channel.publish(b"expected")
        return
    pauses: list[float] = []
    threading.Timer(0.1, channel.expect).start()
    with mock.patch.object(mpi.time, "sleep", pauses.append):
        assert channel.receive(30.0) == b"expected"
    assert set(pauses) == {mpi._NAP_S}


def check_values(world: World) -> None:
    assert world.all_values(2**40 + world.rank) == tuple(2**40 + rank for rank in range(world.size))
    told = world.gather(f"rank {world.rank}".encode())
    assert told == ([f"rank {rank}".encode() for rank in range(world.size)] if world.rank == 0 else [])
    world.barrier()


def check_late(world: World) -> None:
    """Rank 0 waits for a peer that does not come."""
    if world.rank == 0:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="rank 1"):
            world.groups["tp"].all_reduce(torch.zeros(8))
        assert time.monotonic() - started < 25
        print("late ok", flush=True)
        world.abort(3)
    time.sleep(30)


CHECKS = {
    "rows": (check_rows,),
    "expected": (check_expected,),
    "all": (check_idle, check_values, check_all_reduce, check_batches, check_rows, check_plans),
    "sums": (check_all_reduce, check_batches, check_plans),
    "late": (check_late,),
    "join": (),
}


def main() -> None:
    check, collectives = sys.argv[1:3]
    if "--without-kernels" in sys.argv:
        sys.modules["allspan.kernels.cpu._native"] = None  # type: ignore[assignment]
    torch.set_num_threads(1)
    timeout = 1.0 if check == "late" else 30.0
    threads = 2 if check in ("all", "sums") else 1
    config = ParallelConfig(collectives=collectives, timeout_s=timeout, oversubscribed=True, threads=threads)
    world = join_world(config, split=by_argument if "--hosts" in sys.argv else by_shared_memory)
    try:
        for function in CHECKS[check]:
            function(world)
    except BaseException as error:
        print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
        world.abort(1)
    kind = world.kind
    world.close()
    if world.rank == 0:
        print(f"ok {kind}", flush=True)


if __name__ == "__main__":
    main()
