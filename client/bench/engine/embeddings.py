"""`allspan bench embeddings`: vectors of equally long random inputs, all in one call, on a cluster started for it."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.load import random_prompt
from allspan.client.bench.report import facts, mib
from allspan.client.engine import ClientEngine
from allspan.protos.cluster.progress import Progress


@dataclass(frozen=True)
class EmbeddingsConfig:
    """The settings of the benchmark of embeddings."""

    num_inputs: int = 512
    """Sends this many inputs in one call."""
    input_len: int = 128
    """Sets the tokens of each input; they are drawn at random."""
    repeats: int = 3
    """Measures this many calls and reports medians."""
    warmup: int = 1
    """Makes this many calls first that are not counted."""
    seed: int = 0
    """Seeds the generator of the random inputs."""

    def __post_init__(self) -> None:
        at_least(self, {"num_inputs": 1, "input_len": 1, "repeats": 1, "warmup": 0})


def prepare(config: EmbeddingsConfig, options: Options) -> Options:
    """Returns the options with a context length that fits the inputs, unless it is set."""
    return with_context(options, config.input_len + 1, "--input-len + 1")


def measure(engine: ClientEngine, config: EmbeddingsConfig, options: Options) -> Report:
    """New inputs each time: nothing may come from a cache."""
    draw = random.Random(config.seed)
    seconds: list[float] = []
    with Progress("bench embeddings", config.warmup + config.repeats, "calls") as progress:
        for number in range(config.warmup + config.repeats):
            inputs = [random_prompt(draw, engine, config.input_len) for _ in range(config.num_inputs)]
            before = time.perf_counter()
            engine.embed(inputs)
            seconds.append(time.perf_counter() - before)
            progress(number + 1)
    return summary(config, seconds[config.warmup :]) | {
        "peak_rss_bytes": [rank.peak_rss_bytes for rank in engine.statistics().ranks]
    }


def summary(config: EmbeddingsConfig, seconds: list[float]) -> Report:
    """Medians over the calls, and `spread`: the least and the most of each."""
    samples = {
        "inputs_per_s": [config.num_inputs / each for each in seconds],
        "tokens_per_s": [config.num_inputs * config.input_len / each for each in seconds],
        "call_s": seconds,
    }
    return {
        **{key: statistics.median(values) for key, values in samples.items()},
        "spread": {key: [min(values), max(values)] for key, values in samples.items()},
    }


def table(report: Report) -> str:
    return facts(
        [
            ("inputs", f"{report['inputs_per_s']:10.1f} a second"),
            ("tokens", f"{report['tokens_per_s']:10.1f} tokens/s"),
            ("time of a call", f"{report['call_s']:10.2f} s"),
            ("peak memory", f"{', '.join(mib(value) for value in report['peak_rss_bytes'])} (one value per rank)"),
        ]
    )


EMBEDDINGS = Benchmark(
    "embeddings",
    "Measures how fast vectors of many inputs are made in one call.",
    EmbeddingsConfig,
    prepare,
    measure,
    table,
)
