"""`allspan bench prefix`: what the prefix cache saves when a prompt's beginning is known, and what it costs else.

One run, one cluster. The curve: for every repeat a new random prompt is sent (nothing of it is cached), then prompts of
the same length that share its first part, in changing order, each alone. The cost: batches of random prompts,
alternately with the cache and with each request's `prefix_cache=False`, in the order on, off, off, on, so that a slow
drift of the machine touches both alike.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.load import Answer, ask, greedy, random_prompt, spread
from allspan.client.bench.plot import check_plot, plot_prefix
from allspan.client.bench.report import columns, facts, ms
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.wording import counted


@dataclass(frozen=True)
class PrefixConfig:
    """The settings of the prefix-cache benchmark."""

    prompt_len: int = 1024
    """Sets the prompt tokens of each request; they are drawn at random."""
    hits: tuple[int, ...] = (0, 30, 60, 90, 97)
    """Sets the shares of a prompt, in percent, that an earlier prompt began with."""
    repeats: int = 7
    """Sends this many prompts of each share."""
    batch_size: int = 8
    """Sends this many requests at once to measure the cost of the cache."""
    output_len: int = 16
    """Sets the new tokens of each of those requests."""
    rounds: int = 4
    """Makes this many pairs of batches, with and without the cache; 0 leaves this part out."""
    seed: int = 0
    """Seeds the generator of the random prompts."""
    plot: str = ""
    """Draws the curve into this file (PNG, SVG or PDF); it needs matplotlib."""

    def __post_init__(self) -> None:
        at_least(self, {"prompt_len": 2, "repeats": 1, "batch_size": 1, "output_len": 1, "rounds": 0})
        if not self.hits or any(not 0 <= hit < 100 for hit in self.hits):
            raise ConfigError(f"--hits is {','.join(map(str, self.hits))}, must be percents from 0 to 99")


def prepare(config: PrefixConfig, options: Options) -> Options:
    check_plot(config.plot)
    if options.get("enable_prefix_caching") is False:
        raise ConfigError("--no-enable-prefix-caching leaves nothing to measure here")
    options = {"max_num_seqs": config.batch_size, **options}
    return with_context(options, config.prompt_len + config.output_len, "--prompt-len + --output-len")


def measure(engine: ClientEngine, config: PrefixConfig, options: Options) -> Report:
    report = {"prompt_tokens": config.prompt_len} | asyncio.run(_measure(engine, config))
    if config.plot:
        name = engine.cluster.model
        plot_prefix(
            config.plot,
            report,
            f"{name}, prompts of {config.prompt_len:,} tokens, {counted(len(engine.cluster.ranks), 'rank')}",
        )
    return report


async def _measure(engine: ClientEngine, config: PrefixConfig) -> Report:
    draw = random.Random(config.seed)
    await ask(engine, random_prompt(draw, engine, config.prompt_len), greedy(2))  # warms up
    report: Report = {"curve": await _curve(engine, config, draw)}
    if config.rounds:
        report["throughput"] = await _cost(engine, config, draw)
    return report


async def _curve(engine: ClientEngine, config: PrefixConfig, draw: random.Random) -> list[Report]:
    shares = sorted({0, *config.hits})
    answers: dict[int, list[Answer]] = {share: [] for share in shares}
    for _ in range(config.repeats):
        known = random_prompt(draw, engine, config.prompt_len)
        answers[0].append(await ask(engine, known, greedy(1)))
        for share in draw.sample(shares[1:], len(shares) - 1):
            kept = config.prompt_len * share // 100
            prompt = known[:kept] + random_prompt(draw, engine, config.prompt_len - kept)
            answers[share].append(await ask(engine, prompt, greedy(1)))
    base = [answer.ttft_s for answer in answers[0]]
    curve = []
    for share in shares:
        ttft = [answer.ttft_s for answer in answers[share]]
        cached = [answer.timings.cached_tokens for answer in answers[share] if answer.timings]
        curve.append(
            {
                "hit_percent": share,
                "cached_tokens": statistics.median(cached or [0]),
                "ttft_s": spread(ttft),
                "ratio": statistics.median(time / full for time, full in zip(ttft, base, strict=True)),
            }
        )
    return curve


async def _cost(engine: ClientEngine, config: PrefixConfig, draw: random.Random) -> Report:
    """Tokens (prompt and output) per second of whole batches, and their ratio pair by pair."""
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(config.rounds):
        for cached in (True, False) if pair % 2 == 0 else (False, True):
            speeds[cached].append(await _batch(engine, config, draw, RequestOptions(prefix_cache=cached)))
    ratios = [on / off for on, off in zip(speeds[True], speeds[False], strict=True)]
    return {
        "how": "one engine, each request's prefix_cache on and off in turn",
        "on_tokens_per_s": spread(speeds[True]),
        "off_tokens_per_s": spread(speeds[False]),
        "on_over_off": spread(ratios),
    }


async def _batch(engine: ClientEngine, config: PrefixConfig, draw: random.Random, options: RequestOptions) -> float:
    prompts = [random_prompt(draw, engine, config.prompt_len) for _ in range(config.batch_size)]
    started = time.perf_counter()
    await asyncio.gather(*(ask(engine, prompt, greedy(config.output_len), options) for prompt in prompts))
    return config.batch_size * (config.prompt_len + config.output_len) / (time.perf_counter() - started)


def table(report: Report) -> str:
    rows = [("shared prefix", "cached tokens", "time to first token", "min", "max", "ratio to no cache hit")]
    for point in report["curve"]:
        ttft = point["ttft_s"]
        times = (ms(ttft["median"]), ms(ttft["min"]), ms(ttft["max"]))
        rows.append((f"{point['hit_percent']} %", f"{point['cached_tokens']:.0f}", *times, f"{point['ratio']:.3f} x"))
    text = columns(rows)
    if cost := report.get("throughput"):
        ratio = cost["on_over_off"]
        text += "\n\n" + facts(
            [
                ("throughput without hits, cache on", f"{cost['on_tokens_per_s']['median']:,.1f} tokens/s"),
                ("throughput without hits, cache off", f"{cost['off_tokens_per_s']['median']:,.1f} tokens/s"),
                ("on / off", f"{ratio['median']:.3f} (min {ratio['min']:.3f}, max {ratio['max']:.3f} of the pairs)"),
            ]
        )
    return text


PREFIX = Benchmark(
    "prefix",
    "Measures the time that the prefix cache saves, and its cost when nothing is shared.",
    PrefixConfig,
    prepare,
    measure,
    table,
)
