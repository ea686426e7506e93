"""`allspan bench pipeline`: the throughput of a model on the stages of a pipeline against one rank's.

Two clusters run side by side and take rounds in turn: one rank, and stages with --pipeline-parallel-size, each rank
with --threads threads. A round gives one rank a batch of requests, and the pipeline that batch for each of its batches.
So each step is as large in both, and where each rank has processors of its own S stages are at best S times as fast.

Per rank: `busy` is the time within steps, without that of waiting for another stage; the rest of a round is idle. On a
loaded machine it has the time of waiting for a processor, too.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.engine.latency import one_round
from allspan.client.bench.load import greedy, random_prompt
from allspan.client.bench.machine import machine, versions
from allspan.client.bench.report import columns
from allspan.client.engine import ClientEngine
from allspan.protos.api.engine import EngineStatistics
from allspan.protos.api.wording import counted


@dataclass(frozen=True)
class PipelineConfig:
    """The settings of the pipeline benchmark."""

    batch_size: int = 8
    """Sets the requests of a step: one rank serves so many at once, the pipeline so many in each of its batches."""
    input_len: int = 16
    """Sets the prompt tokens of each request; they are drawn at random."""
    output_len: int = 64
    """Sets the new tokens of each request."""
    rounds: int = 5
    """Measures this many rounds of both, in turn, and reports medians."""
    seed: int = 0
    """Seeds the generator of the random prompts."""

    def __post_init__(self) -> None:
        at_least(self, {"batch_size": 1, "input_len": 1, "output_len": 2, "rounds": 1})


def prepare(config: PipelineConfig, options: Options) -> Options:
    """Returns the options of the pipeline."""
    stages = options.get("pipeline_parallel_size") or 1
    stages = stages if stages > 1 else 2
    batches = options.get("pipeline_batches") or 2 * stages
    own = {"pipeline_parallel_size": stages, "pipeline_batches": batches, "max_num_seqs": batches * config.batch_size}
    options = {"threads": 1, "enable_prefix_caching": False, **options, **own}
    return with_context(options, config.input_len + config.output_len, "--input-len + --output-len")


@dataclass(frozen=True)
class Round:
    """The times of one round of a cluster, in seconds: the wall clock's, and each rank's within steps."""

    wall_s: float
    tokens: int
    busy_s: tuple[float, ...]
    steps: int


def measure_round(engine: ClientEngine, config: PipelineConfig, draw: random.Random, batches: int) -> Round:
    """Sends a batch's requests for each of `batches` at once, and reads them to their end."""
    prompts = [random_prompt(draw, engine, config.input_len) for _ in range(batches * config.batch_size)]
    before, started = engine.statistics(), time.perf_counter()
    asyncio.run(one_round(engine, prompts, greedy(config.output_len)))
    wall_s, after = time.perf_counter() - started, engine.statistics()
    busy = tuple(now - then for now, then in zip(_busy(after), _busy(before), strict=True))
    return Round(wall_s, len(prompts) * config.output_len, busy, after.steps - before.steps)


def _busy(told: EngineStatistics) -> list[float]:
    return [rank.host_s + rank.model_s for rank in sorted(told.ranks, key=lambda rank: rank.rank)]


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the rounds of a cluster; `busy_s` and `idle` have a value for each rank."""
    ranks = range(len(rounds[0].busy_s))
    return {
        "tokens_per_s": statistics.median(each.tokens / each.wall_s for each in rounds),
        "most_tokens_per_s": max(each.tokens / each.wall_s for each in rounds),
        "busy_s_per_step": [
            statistics.median(each.busy_s[rank] / max(1, each.steps) for each in rounds) for rank in ranks
        ],
        "idle": [statistics.median(max(0.0, 1 - each.busy_s[rank] / each.wall_s) for each in rounds) for rank in ranks],
    }


def compared(one: Sequence[Round], stages: Sequence[Round]) -> Report:
    """The report on the rounds of one rank and of the pipeline, pair by pair.

    `speedup_by_busy_time` is what the slowest stage allows: one rank's busy time for a token over that stage's.
    """
    pairs = [s.tokens / s.wall_s * o.wall_s / o.tokens for o, s in zip(one, stages, strict=True)]
    alone = statistics.median(each.busy_s[0] / each.tokens for each in one)
    slowest = statistics.median(max(each.busy_s) / each.tokens for each in stages)
    return {
        "one_rank": summary(one),
        "pipeline": summary(stages),
        "speedup": statistics.median(pairs),
        "speedup_spread": [min(pairs), max(pairs)],
        "speedup_by_busy_time": alone / slowest if slowest else 0.0,
    }


class PipelineBenchmark(Benchmark):
    """A benchmark of two clusters."""

    cluster = "Two clusters are started for it."

    def run(self, model: str, config: Any, quiet: bool = False, **serve_options: Any) -> Report:
        given = {key: value for key, value in serve_options.items() if value is not None}
        options = self.prepare(config, given)
        batches = options["pipeline_batches"]
        alone = {
            key: value for key, value in options.items() if key not in ("pipeline_parallel_size", "pipeline_batches")
        }
        alone |= {"ranks": 1, "max_num_seqs": config.batch_size}
        draw, rounds = random.Random(config.seed), []
        with ClientEngine(model, quiet=quiet, **alone) as one, ClientEngine(model, quiet=quiet, **options) as stages:
            for _ in range(config.rounds + 1):
                rounds.append((measure_round(one, config, draw, 1), measure_round(stages, config, draw, batches)))
            facts = stages.statistics()
        report = compared([pair[0] for pair in rounds[1:]], [pair[1] for pair in rounds[1:]])  # the first warms up
        report["settings"] = {"model": model, **asdict(config), **options}
        report["processors"] = len(os.sched_getaffinity(0))
        return {**report, "versions": versions(facts), "machine": machine()}


def measure(engine: ClientEngine, config: PipelineConfig, options: Options) -> Report:
    """The pipeline's own part, on a cluster that runs."""
    found = measure_round(engine, config, random.Random(config.seed), options["pipeline_batches"])
    return {"pipeline": summary([found])}


def table(report: Report) -> str:
    rows = [("", "tokens/s", "most", "busy a step, by rank", "idle, by rank")]
    for name, title in (("one_rank", "one rank"), ("pipeline", "pipeline")):
        found = report[name]
        busy = " ".join(f"{1e3 * each:.2f} ms" for each in found["busy_s_per_step"])
        idle = " ".join(f"{each:.0%}" for each in found["idle"])
        rows.append((title, f"{found['tokens_per_s']:.0f}", f"{found['most_tokens_per_s']:.0f}", busy, idle))
    least, most = report["speedup_spread"]
    return (
        f"{columns(rows)}\n\npipeline against one rank: {report['speedup']:.2f} times the tokens a second (from "
        f"{least:.2f} to {most:.2f}); the busy times allow {report['speedup_by_busy_time']:.2f}; this "
        f"process may use {counted(report['processors'], 'processor')}"
    )


PIPELINE = PipelineBenchmark(
    "pipeline",
    "Compares stages of a pipeline with one rank of the model: throughput, and how busy each stage is.",
    PipelineConfig,
    prepare,
    measure,
    table,
)
