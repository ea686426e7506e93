"""`allspan bench latency`: batches of equal requests, from random token ids, on a cluster started for them.

The clock is this process's. Per repeat: `ttft_s` is the time from sending until every request of the batch has its
first token; prefill is the batch's prompt tokens over that time; decode is the tokens that came after that moment, over
the time from then to the last. In a batch whose last prompt is read when the others are done, decode is all but the
first tokens, over the time from the first of them all. Output is all new tokens over the whole time.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.load import ask, greedy, random_prompt
from allspan.client.bench.report import columns, facts, mib, ms
from allspan.client.engine import ClientEngine
from allspan.protos.api.engine import EngineStatistics
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.progress import Progress

_SIZES = ("batch_size", "input_len", "output_len")
_BATCH = re.compile("x".join(["[1-9][0-9]{0,7}"] * len(_SIZES)))


@dataclass(frozen=True)
class LatencyConfig:
    """The settings of the latency benchmark."""

    batch_size: int = 1
    """Sends this many requests at once."""
    input_len: int = 128
    """Sets the prompt tokens of each request; they are drawn at random."""
    output_len: int = 32
    """Sets the new tokens of each request."""
    batches: tuple[str, ...] = ()
    """Measures these batches instead, one after the other, each written as REQUESTSxINPUTxOUTPUT, such as
    1x8192x1,64x1024x256."""
    repeats: int = 3
    """Measures this many runs and reports medians."""
    warmup: int = 1
    """Makes this many runs first that are not counted."""
    seed: int = 0
    """Seeds the generator of the random prompts."""

    def __post_init__(self) -> None:
        at_least(self, {"batch_size": 1, "input_len": 1, "output_len": 1, "repeats": 1, "warmup": 0})
        batch_sizes(self.batches)

    @property
    def each(self) -> tuple[LatencyConfig, ...]:
        """The settings of each batch."""
        return tuple(replace(self, batches=(), **each) for each in batch_sizes(self.batches)) or (self,)


def batch_sizes(batches: Sequence[str]) -> list[dict[str, int]]:
    """Returns `batch_size`, `input_len` and `output_len` of each of --batches. ConfigError for another text."""
    for batch in batches:
        if not _BATCH.fullmatch(batch):
            raise ConfigError(f"--batches has {batch!r}, must be REQUESTSxINPUTxOUTPUT, such as 64x1024x256")
    return [dict(zip(_SIZES, map(int, batch.split("x")), strict=True)) for batch in batches]


@dataclass(frozen=True)
class Round:
    """The times of one batch, from sending to its last token, in seconds, and the tokens that came within
    `decode_s`."""

    ttft_s: float
    decode_s: float
    decode_tokens: int
    total_s: float


def prepare(config: LatencyConfig, options: Options) -> Options:
    """Returns the options with a context length that fits the requests, and room for all of them at once, unless they
    are set."""
    options = {"max_num_seqs": max(64, *(batch.batch_size for batch in config.each)), **options}
    most = max(batch.input_len + batch.output_len for batch in config.each)
    return with_context(options, most, "--input-len + --output-len")


def measure(engine: ClientEngine, config: LatencyConfig, options: Options) -> Report:
    found: list[Report] = []
    for batch in config.each:
        before, rounds, after = measure_rounds(engine, batch)
        found.append(summary(batch, rounds, before, after))
    if not config.batches:
        return found[0]
    sizes = [{name: getattr(batch, name) for name in _SIZES} for batch in config.each]
    return {"batches": [size | report for size, report in zip(sizes, found, strict=True)]}


def measure_rounds(
    engine: ClientEngine, config: LatencyConfig
) -> tuple[EngineStatistics, list[Round], EngineStatistics]:
    """The measured rounds, and the engine's counters before and after them."""
    draw = random.Random(config.seed)
    params = greedy(config.output_len)

    def round_of() -> Round:
        # New prompts each time: nothing may come from a cache.
        prompts = [random_prompt(draw, engine, config.input_len) for _ in range(config.batch_size)]
        return asyncio.run(one_round(engine, prompts, params))

    with Progress("bench latency", config.warmup + config.repeats, "runs") as progress:
        for number in range(config.warmup):
            round_of()
            progress(number + 1)
        before = engine.statistics()
        rounds = []
        for number in range(config.repeats):
            rounds.append(round_of())
            progress(config.warmup + number + 1)
    return before, rounds, engine.statistics()


def summary(
    config: LatencyConfig, rounds: Sequence[Round], before: EngineStatistics, after: EngineStatistics
) -> dict[str, Any]:
    """Medians over the rounds, and `spread`: the least and the most of each."""
    samples = {
        "prefill_tokens_per_s": [config.batch_size * config.input_len / r.ttft_s for r in rounds],
        "decode_tokens_per_s": [r.decode_tokens / r.decode_s if r.decode_tokens else 0.0 for r in rounds],
        "output_tokens_per_s": [config.batch_size * config.output_len / r.total_s for r in rounds],
        "ttft_s": [r.ttft_s for r in rounds],
    }
    steps = max(after.steps - before.steps, 1)
    return {
        **{key: statistics.median(values) for key, values in samples.items()},
        "host_s_per_step": (after.host_s - before.host_s) / steps,
        "load_s": max(rank.load_s for rank in after.ranks),
        "peak_rss_bytes": [rank.peak_rss_bytes for rank in after.ranks],
        "spread": {key: [min(values), max(values)] for key, values in samples.items()},
    }


async def one_round(
    engine: ClientEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    options: Sequence[RequestOptions] = (),
) -> Round:
    """Sends all prompts at once, with options for each where there are any, and reads each to its last token."""
    each: Sequence[RequestOptions | None] = options or [None] * len(prompts)
    started = time.perf_counter()
    asked = (ask(engine, prompt, params, own) for prompt, own in zip(prompts, each, strict=True))
    answers = await asyncio.gather(*asked)
    return round_from(started, [answer.arrivals for answer in answers])


def round_from(started: float, arrivals: Sequence[Sequence[float]]) -> Round:
    """A round from the moments at which each request's tokens came."""
    all_first = max(times[0] for times in arrivals)
    last = max(times[-1] for times in arrivals)
    if later := sum(moment > all_first for times in arrivals for moment in times):
        return Round(all_first - started, last - all_first, later, last - started)
    first = min(times[0] for times in arrivals)
    count = sum(len(times) - 1 for times in arrivals) if last > first else 0
    return Round(all_first - started, last - first, count, last - started)


def table(report: Report) -> str:
    if "batches" in report:
        heads = ("batch", "prefill, tokens/s", "decode, tokens/s", "output, tokens/s", "time to first token")
        rows = [
            (
                "x".join(str(each[name]) for name in _SIZES),
                f"{each['prefill_tokens_per_s']:.1f}",
                f"{each['decode_tokens_per_s']:.1f}",
                f"{each['output_tokens_per_s']:.1f}",
                ms(each["ttft_s"]),
            )
            for each in report["batches"]
        ]
        return columns([heads, *rows])
    return facts(
        [
            ("prefill", f"{report['prefill_tokens_per_s']:10.1f} tokens/s"),
            ("decode", f"{report['decode_tokens_per_s']:10.1f} tokens/s"),
            ("output", f"{report['output_tokens_per_s']:10.1f} tokens/s"),
            ("time to first token", f"{report['ttft_s'] * 1000:10.1f} ms"),
            ("host time per step", f"{report['host_s_per_step'] * 1e6:10.0f} us"),
            ("load time", f"{report['load_s']:10.1f} s"),
            ("peak memory", f"{', '.join(mib(value) for value in report['peak_rss_bytes'])} (one value per rank)"),
        ]
    )


LATENCY = Benchmark(
    "latency",
    "Measures prefill and decode speed with batches of equal requests.",
    LatencyConfig,
    prepare,
    measure,
    table,
)
