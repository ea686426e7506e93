"""What ranks with a GPU each do in a test: `mpirun … python gpu_checks.py CHECK`; more ranks than GPUs share them.
Prints "ok" on rank 0, and with `times` what a sum takes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from support.mpirun import set_visible_gpu

set_visible_gpu()  # before torch looks

import torch  # noqa: E402

from allspan.protos.api.errors import DeadlineExceeded  # noqa: E402
from allspan.protos.config.settings import ParallelConfig  # noqa: E402
from allspan.worker.backend.cuda.backend import CudaBackend  # noqa: E402
from allspan.worker.backend.cuda.collectives import GpuCollectives  # noqa: E402
from allspan.worker.parallel.world import World, join_world  # noqa: E402

SIZES = (1, 8, 576, 4096, 100_003, 1 << 20, (4 << 20) + 3, 9_000_000)
WIDTH = 4096
REPEATS = 50


def tensors(group: GpuCollectives, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's, the same on each."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, generator=generator).to(dtype).cuda() for _ in range(group.size)]


def check_sums(world: World, group: GpuCollectives) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for size in SIZES:
            parts = tensors(group, size, dtype)
            expected = parts[0].float()
            for part in parts[1:]:
                expected = expected + part.float()
            for _ in range(3):
                x = parts[group.rank].clone()
                group.all_reduce(x)
                if world.kind == "ipc" and (group.size == 2 or x.nbytes < 16 << 20):
                    assert torch.equal(x, expected.to(dtype)), f"{size} elements of {dtype}"
                torch.testing.assert_close(x.float(), expected, rtol=2e-2, atol=2e-2)


def check_graph(world: World, group: GpuCollectives) -> None:
    x = torch.ones(3, WIDTH, dtype=torch.bfloat16, device="cuda")
    residual, weight = torch.zeros(3, WIDTH, device="cuda"), torch.ones(WIDTH, device="cuda")
    group.all_reduce_add_rms_norm(x, residual, weight, 1e-5, torch.empty_like(x))
    graph = torch.cuda.CUDAGraph()
    out = torch.empty_like(x)
    with torch.cuda.graph(graph):
        for _ in range(5):
            group.all_reduce_add_rms_norm(x, residual, weight, 1e-5, out)
    residual.zero_()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert bool((residual == 100.0 * group.size).all())
    group.check()


def check_late(world: World, group: GpuCollectives) -> None:
    """Rank 1 never comes."""
    if group.rank == 0:
        group.all_reduce(torch.ones(64, device="cuda"))
        torch.cuda.synchronize()
        try:
            group.check()
        except DeadlineExceeded as error:
            print("late ok" if "rank 1" in str(error) else error, flush=True)
        world.abort(3)
    time.sleep(60)


def check_times(world: World, group: GpuCollectives) -> None:
    """Medians of a call in a graph, in microseconds."""
    for rows in (1, 2, 4, 8, 32, 64, 128, 256, 512):
        x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
        residual, weight = torch.zeros(rows, WIDTH, device="cuda"), torch.ones(WIDTH, device="cuda")
        nccl = group._nccl
        ways: dict[str, Callable[[], None]] = {
            "sum": partial(group.all_reduce, x),
            "sum and norm": partial(group.all_reduce_add_rms_norm, x, residual, weight, 1e-5, torch.empty_like(x)),
        }
        if nccl is not None:
            ways["NCCL"] = partial(nccl.all_reduce, x)
        times = ", ".join(f"{name} {_time(world, call):.1f} us" for name, call in ways.items())
        if world.rank == 0:
            print(f"{x.nbytes} bytes: {times}", flush=True)


def _time(world: World, call: Callable[[], None]) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    new_event: Any = torch.cuda.Event
    events = new_event(enable_timing=True), new_event(enable_timing=True)
    taken: list[float] = []
    for _ in range(15):
        world.barrier()
        begin, end = events
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(1e3 * begin.elapsed_time(end) / REPEATS)
    return sorted(taken)[len(taken) // 2]


CHECKS = {"sums": check_sums, "graph": check_graph, "late": check_late, "times": check_times}


def main() -> None:
    check = sys.argv[1]
    world = join_world(ParallelConfig(timeout_s=3.0 if check == "late" else 60.0), CudaBackend().collectives)
    group = world.groups["tp"]
    assert isinstance(group, GpuCollectives), world.kind
    try:
        CHECKS[check](world, group)
        torch.cuda.synchronize()
        world.barrier()
        if world.rank == 0:
            print(f"ok {world.kind}", flush=True)
        world.close()
    except BaseException as error:
        print(f"rank {world.rank}: {error!r}", flush=True)
        world.abort(1)
    os._exit(0)


if __name__ == "__main__":
    main()
