"""`allspan bench step`: the host time of a decode step outside the model: scheduling, plan, sampling's bookkeeping.

The counters are the leader's own, taken when every request of a batch has its first token and again before any ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.load import greedy, random_prompt, spread
from allspan.client.bench.report import columns
from allspan.client.engine import ClientEngine
from allspan.protos.api.engine import EngineStatistics
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.results import ResultQueue

MARGIN = 8
"""Tokens that are still to come when the counters are read the second time."""
ATTEMPTS = 5
"""A small model may have ended before its counters are read."""


@dataclass(frozen=True)
class StepConfig:
    """The batches of the step benchmark, and their duration."""

    batch_sizes: tuple[int, ...] = (1, 64)
    """Measures decode steps of these numbers of requests."""
    input_len: int = 16
    """Sets the prompt tokens of each request; they are drawn at random."""
    output_len: int = 128
    """Sets the new tokens of each request."""
    repeats: int = 3
    """Runs each batch this many times."""
    seed: int = 0
    """Seeds the generator of the random prompts."""

    def __post_init__(self) -> None:
        at_least(self, {"input_len": 1, "output_len": 2 * MARGIN, "repeats": 1})
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError(f"--batch-sizes is {','.join(map(str, self.batch_sizes))}, must be numbers from 1 on")


def prepare(config: StepConfig, options: Options) -> Options:
    options = {"max_num_seqs": max(*config.batch_sizes, 64), **options}
    return with_context(options, config.input_len + config.output_len, "--input-len + --output-len")


def measure(engine: ClientEngine, config: StepConfig, options: Options) -> Report:
    draw = random.Random(config.seed)
    batches = []
    for size in config.batch_sizes:
        asyncio.run(_decode(engine, config, draw, size))  # warms up
        runs = [_seen(engine, config, draw, size) for _ in range(config.repeats)]
        pairs = [(after, before, after.steps - before.steps) for before, after in runs]
        batches.append(
            {
                "batch_size": size,
                "steps": sum(steps for _, _, steps in pairs),
                "host_s": spread([(after.host_s - before.host_s) / steps for after, before, steps in pairs]),
                "model_s": spread([(after.model_s - before.model_s) / steps for after, before, steps in pairs]),
            }
        )
    return {"batches": batches}


def _seen(
    engine: ClientEngine, config: StepConfig, draw: random.Random, size: int
) -> tuple[EngineStatistics, EngineStatistics]:
    """The counters before and after some steps. ConfigError when all are over too soon to be seen, again and again."""
    for _ in range(ATTEMPTS):
        before, after = asyncio.run(_decode(engine, config, draw, size))
        if after.steps > before.steps:
            return before, after
    raise ConfigError(f"--output-len is {config.output_len}: too few steps to be seen, give more")


async def _decode(
    engine: ClientEngine, config: StepConfig, draw: random.Random, size: int
) -> tuple[EngineStatistics, EngineStatistics]:
    prompts = [random_prompt(draw, engine, config.input_len) for _ in range(size)]
    params = greedy(config.output_len)
    opened = await asyncio.gather(*(engine.astart_request(prompt, params) for prompt in prompts))
    queues = [queue for _, queue in opened]
    try:
        for queue in queues:
            await _read_until(queue, 1, config)
        before = await engine.astatistics()
        last = config.output_len - MARGIN
        while all(queue.num_tokens < last for queue in queues):
            await _read_until(queues[0], queues[0].num_tokens + 1, config)
        after = await engine.astatistics()
        for queue in queues:
            await _read_until(queue, config.output_len, config)
    finally:
        for handle, _ in opened:
            engine.release_request(handle)
    return before, after


async def _read_until(queue: ResultQueue, num_tokens: int, config: StepConfig) -> None:
    """Returns when so many have come; ConfigError when the request has ended before."""
    while queue.num_tokens < num_tokens:
        if await queue.aget() is None:
            raise ConfigError(
                f"--input-len + --output-len is {config.input_len + config.output_len}, but a request ended after"
                f" {config.input_len + queue.num_tokens} tokens, at the end of the cluster's context: give less, or"
                " start the cluster with more --max-model-len"
            )


def table(report: Report) -> str:
    rows: list[Sequence[str]] = [("batch size", "host time per step", "min", "max", "model time per step")]
    for batch in report["batches"]:
        host = batch["host_s"]
        times = [f"{1000 * value:.3f} ms" for value in (host["median"], host["min"], host["max"])]
        rows.append((str(batch["batch_size"]), *times, f"{1000 * batch['model_s']['median']:.2f} ms"))
    return columns(rows)


STEP = Benchmark(
    "step", "Measures the time that a decode step spends outside the model.", StepConfig, prepare, measure, table
)
