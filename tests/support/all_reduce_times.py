"""Times of an all-reduce in one run, in turns: ours, MPI's blocking one over all ranks, and over one rank a host.

`mpirun … python all_reduce_times.py BYTES…` prints a JSON object for each: the median and the tenth percentile in µs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from allspan.protos.config.settings import ParallelConfig
from allspan.worker.parallel.world import join_world

ROUNDS, REPEATS = 5, 60


def main() -> None:
    torch.set_num_threads(1)
    world = join_world(ParallelConfig(timeout_s=30.0))
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    firsts = comm.Split(0 if host.rank == 0 else MPI.UNDEFINED, comm.rank)
    group = world.groups["tp"]
    for size in map(int, sys.argv[1:]):
        x = torch.zeros(size // 4)
        array = x.numpy()
        kinds: dict[str, Callable[[], Any]] = {
            world.kind: lambda x=x: group.all_reduce(x),
            "mpi": lambda array=array: comm.Allreduce(MPI.IN_PLACE, array),
        }
        if firsts != MPI.COMM_NULL and host.size > 1:
            kinds["mpi between hosts"] = lambda array=array: firsts.Allreduce(MPI.IN_PLACE, array)
        elif host.size > 1:
            kinds["mpi between hosts"] = lambda: None
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind, call in kinds.items():
                comm.Barrier()
                for _ in range(REPEATS):
                    started = time.perf_counter()
                    call()
                    taken[kind].append((time.perf_counter() - started) * 1e6)
        if world.rank == 0:
            times = {kind: np.percentile(each, (50, 10)).round(1).tolist() for kind, each in taken.items()}
            print(json.dumps({"bytes": size, "ranks": world.size, "cores": os.cpu_count(), "us": times}), flush=True)
    world.close()


if __name__ == "__main__":
    main()
