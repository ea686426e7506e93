"""What the stages of a pipeline do in a test: `mpirun … python gpu_stages.py FOLDER DTYPE STAGES`; more stages than
GPUs share them. Rank 0 prints what `outputs` returns as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.mpirun import set_visible_gpu

if __name__ == "__main__":
    set_visible_gpu()  # before torch looks

from allspan.protos.config.settings import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServiceConfig,
    WorkerConfig,
)
from allspan.worker.backend.table import open_backend
from allspan.worker.engine.setup import LoadedEngine, load_engine
from allspan.worker.load.loader import open_ops
from allspan.worker.parallel.base import Collectives, PlanChannel
from allspan.worker.parallel.world import join_world
from allspan.worker.scheduler.request import Request
from support.cores import Collected, request
from support.tiny_models import prompt

LENGTHS = (3, 40, 17, 1, 33, 40)
"""Of the prompts: of several chunks, and two that are equal."""
VOCAB = 97


def config(folder: Path, dtype: str, stages: int, device: str = "cuda") -> WorkerConfig:
    return WorkerConfig(
        ModelConfig(str(folder), "tiny", max_model_len=128, dtype=dtype, device=device),
        ServiceConfig("-"),
        CacheConfig(page_size=16, kv_cache_bytes=2**21),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24),
        ParallelConfig(pipeline_parallel_size=stages),
    )


def asked(count: int) -> list[Request]:
    """Greedy requests, and two that sample, with penalties and log-probabilities."""
    requests = []
    for number, length in enumerate(LENGTHS):
        heat: dict[str, Any] = {}
        if number in (2, 4):
            heat = {"temperature": 0.8, "repetition_penalty": 1.2, "logprobs": 2}
        ids = prompt(length, VOCAB, length)
        requests.append(request(number, ids, max_tokens=count + number, ignore_eos=True, **heat))
    return requests


def outputs(loaded: LoadedEngine, count: int) -> dict[str, Any]:
    """The leader's tokens of `asked`, the most steps that were in flight, and the number of captured graphs."""
    core, most = loaded.core, 0
    core.on_outputs = collected = Collected()
    requests = asked(count)
    for one in requests:
        core.submit(one)
    while core.step():
        core.check()
        most = max(most, core._loop.runner.num_in_flight)
    assert not collected.errors, collected.errors
    tokens = [collected.tokens(one) for one in requests]
    return {"tokens": tokens, "in_flight": most, "graphs": len(loaded.model._passes.plain.steps._graphs)}


def run_stage(
    settings: WorkerConfig,
    collectives: Collectives,
    channel: PlanChannel | None,
    count: int,
    barrier: Callable[[], None],
    is_leader: bool,
) -> dict[str, Any]:
    """One rank from its load to its end; the leader's `outputs`."""
    loaded = load_engine(settings, open_ops(settings), collectives, channel)
    for one in () if is_leader else asked(count):
        loaded.core.submit(one)
    barrier()
    made = outputs(loaded, count) if is_leader else {}
    if is_leader:
        loaded.core.shutdown()
    loaded.core.run()
    return made


def main() -> None:
    folder, dtype, stages = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    settings = config(folder, dtype, stages)
    world = join_world(settings.parallel, open_backend("cuda").collectives)
    try:
        made = run_stage(settings, world.groups["tp"], world.channel, 24, world.barrier, world.rank == 0)
        if world.rank == 0:
            print(json.dumps(made), flush=True)
        world.close()
    except BaseException as error:
        print(f"rank {world.rank}: {error!r}", flush=True)
        world.abort(1)
    os._exit(0)


if __name__ == "__main__":
    main()
