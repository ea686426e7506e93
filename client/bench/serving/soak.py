"""`allspan bench soak`: minutes of mixed load, with requests that are cancelled and requests that are wrong.

It asks whether anything grows or changes: the ranks' memory, the slowest percent of answers, and the tokens of a
canary, one greedy prompt that is sent again and again, with the prefix cache and without.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.load import Answer, ask, fill, greedy, percentile, random_prompt
from allspan.client.bench.machine import resident_bytes
from allspan.client.bench.report import facts, mib, ms
from allspan.client.bench.trend import trend
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import AllspanError, ConfigError, InvalidRequest
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.progress import Progress

SAMPLE_S = 1.0
CANARY_PAUSE_S = 0.5
CANARY_TOKENS = 24
MAX_LISTED = 10

VARIETIES: tuple[dict[str, float | int | bool], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.0, "typical_p": 0.9, "no_repeat_ngram_size": 3, "min_tokens": 2},
    {"temperature": 0.0, "logprobs": 5},
)
"""The kinds of sampling that requests use, chosen at random."""


@dataclass(frozen=True)
class SoakConfig:
    """The duration and the load of a soak, and the share of requests that are cancelled or invalid."""

    minutes: float = 10.0
    """Sets the minutes of load."""
    concurrency: int = 16
    """Sets the callers; each sends its next request when the last one has ended."""
    input_len: int = 256
    """Sets the most prompt tokens of a request; the least is 2. Half of the requests begin like others."""
    output_len: int = 64
    """Sets the most new tokens of a request; the least is 2."""
    cancel_percent: float = 5.0
    """Sets the percent of the requests that are cancelled while they run."""
    bad_percent: float = 1.0
    """Sets the percent of the requests that are wrong and must be refused."""
    seed: int = 0
    """Seeds the generator of prompts, lengths, cancellations and wrong requests."""

    def __post_init__(self) -> None:
        at_least(self, {"minutes": 0.01, "concurrency": 1, "input_len": 8, "output_len": 2})
        at_least(self, {"cancel_percent": 0, "bad_percent": 0})
        if self.cancel_percent + self.bad_percent > 100:
            raise ConfigError("--cancel-percent + --bad-percent is more than 100")


@dataclass
class _Record:
    """The results so far. Times are `time.perf_counter()`."""

    finished: list[tuple[float, Answer]] = field(default_factory=list)
    """The finished requests, each with the time of its end."""
    cancelled: int = 0
    refused: int = 0
    unexpected: Counter[str] = field(default_factory=Counter)
    canaries: list[tuple[int, ...]] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """(moment, bytes of all ranks)."""


def prepare(config: SoakConfig, options: Options) -> Options:
    # As many pages as the callers need: all of them are used soon, so that memory can be seen to stand still.
    options = {"max_num_seqs": config.concurrency + 1, **options}
    return with_context(options, config.input_len + config.output_len, "--input-len + --output-len")


def measure(engine: ClientEngine, config: SoakConfig, options: Options) -> Report:
    return asyncio.run(_measure(engine, config))


async def _measure(engine: ClientEngine, config: SoakConfig) -> Report:
    await fill(engine)
    record = _Record()
    started = time.perf_counter()
    end = started + 60 * config.minutes
    callers = [_caller(engine, config, record, end, place) for place in range(config.concurrency)]
    await asyncio.gather(*callers, _canary(engine, config, record, end), _watch_memory(engine, record, end))
    left = await engine.astatistics()
    return {
        "requests": {
            "finished": len(record.finished),
            "cancelled": record.cancelled,
            "refused": record.refused,
            "unexpected": dict(record.unexpected.most_common(MAX_LISTED)),
        },
        "canary": {
            "asked": len(record.canaries),
            "changed": sum(tokens != record.canaries[0] for tokens in record.canaries),
        },
        "tokens_per_s": sum(len(answer.token_ids) for _, answer in record.finished) / (time.perf_counter() - started),
        "memory": _memory(record, started, end),
        **_latency(record, started, end),
        "left": {"running": left.running, "waiting": left.waiting, "pages_used": left.pages_used},
    }


async def _caller(engine: ClientEngine, config: SoakConfig, record: _Record, end: float, place: int) -> None:
    draw = random.Random(f"{config.seed} {place}")
    while time.perf_counter() < end:
        fate = 100 * draw.random()
        try:
            if fate < config.bad_percent:
                await _bad(engine, draw)
                record.unexpected["a bad request was taken"] += 1
            else:
                await _good(engine, config, record, draw, fate < config.bad_percent + config.cancel_percent)
        except InvalidRequest as error:
            if fate < config.bad_percent:
                record.refused += 1
            else:
                record.unexpected[error.message[:160]] += 1
        except AllspanError as error:
            record.unexpected[f"{type(error).__name__}: {error.message[:160]}"] += 1
            await asyncio.sleep(CANARY_PAUSE_S)


async def _good(
    engine: ClientEngine, config: SoakConfig, record: _Record, draw: random.Random, is_cancelled: bool
) -> None:
    length, wanted = draw.randint(2, config.input_len), draw.randint(2, config.output_len)
    beginning = random_prompt(random.Random(draw.randrange(8)), engine, config.input_len // 2)
    own = random_prompt(draw, engine, length)
    prompt = (beginning + own)[:length] if draw.random() < 0.5 else own
    variety = {"min_tokens": 0} | draw.choice(VARIETIES)
    params = SamplingParams(max_tokens=wanted, seed=draw.randrange(2**32), **variety)  # type: ignore[arg-type]
    answer = await ask(engine, prompt, params, cancel_after=draw.randint(1, wanted - 1) if is_cancelled else None)
    if answer.finish_reason == "cancelled":
        record.cancelled += 1
    else:
        record.finished.append((time.perf_counter(), answer))


async def _bad(engine: ClientEngine, draw: random.Random) -> None:
    """Sends a request that the client or a rank must refuse."""
    sizes = engine.cluster
    kinds: tuple[Callable[[], tuple[list[int], SamplingParams]], ...] = (
        lambda: ([sizes.vocab_size], SamplingParams(max_tokens=4)),
        lambda: ([], SamplingParams(max_tokens=4)),
        lambda: ([1] * sizes.max_model_len, SamplingParams(max_tokens=4)),
        lambda: ([1, 2], SamplingParams(max_tokens=4, temperature=-1.0)),
        lambda: ([1, 2], SamplingParams(max_tokens=4, top_p=float("nan"))),
        lambda: ([1, 2], SamplingParams(max_tokens=4, allowed_token_ids=(sizes.vocab_size,))),
    )
    prompt, params = draw.choice(kinds)()
    await ask(engine, prompt, params)


async def _canary(engine: ClientEngine, config: SoakConfig, record: _Record, end: float) -> None:
    tokens = min(CANARY_TOKENS, config.output_len)
    prompt = random_prompt(random.Random(f"{config.seed} canary"), engine, config.input_len)
    while time.perf_counter() < end:
        options = RequestOptions(prefix_cache=len(record.canaries) % 2 == 0)
        try:
            answer = await ask(engine, prompt, greedy(tokens), options)
            record.canaries.append(answer.token_ids)
        except AllspanError as error:
            record.unexpected[f"canary: {error.message[:160]}"] += 1
        await asyncio.sleep(min(CANARY_PAUSE_S, max(end - time.perf_counter(), 0.0)))


async def _watch_memory(engine: ClientEngine, record: _Record, end: float) -> None:
    started = time.perf_counter()
    with Progress("bench soak", round(end - started), "seconds") as progress:
        while (now := time.perf_counter()) < end:
            with suppress(AllspanError):  # a world that is down has no memory to look at; its requests tell
                record.memory.append((now, float(sum(resident_bytes(await engine.astatistics())))))
            progress(round(now - started))
            await asyncio.sleep(min(SAMPLE_S, max(end - time.perf_counter(), 0.0)))


def _memory(record: _Record, started: float, end: float) -> Report:
    """The slope leaves out the first minute (of a short run: the first quarter), in which memory is first used."""
    begun = started + min(60.0, (end - started) / 4)
    samples = [(moment / 60, size) for moment, size in record.memory if moment >= begun]
    slope, error = trend(samples)
    sizes = [size for _, size in samples] or [0.0]
    return {
        "slope_bytes_per_minute": slope,
        "slope_standard_error": error,
        "first_bytes": sizes[0],
        "last_bytes": sizes[-1],
        "most_bytes": max(sizes),
        "samples": len(samples),
    }


def _latency(record: _Record, started: float, end: float) -> Report:
    """Returns the P99 latency of the first and the last minute (of a short run: of its halves)."""
    minute = min(60.0, (end - started) / 2)
    parts = {}
    for name, first, last in (("first", started, started + minute), ("last", end - minute, end)):
        answers = [answer for moment, answer in record.finished if first <= moment <= last and answer.arrivals]
        parts[name] = {
            "ttft_p99_s": percentile([answer.ttft_s for answer in answers], 99),
            "inter_token_p99_s": percentile([gap for answer in answers for gap in answer.gaps_s], 99),
            "requests": len(answers),
        }
    ratios = {
        name: parts["last"][name] / parts["first"][name] if parts["first"][name] else 0.0
        for name in ("ttft_p99_s", "inter_token_p99_s")
    }
    return {"first_minute": parts["first"], "last_minute": parts["last"], "last_over_first": ratios}


def table(report: Report) -> str:
    requests, memory, ratios = report["requests"], report["memory"], report["last_over_first"]
    unexpected = sum(requests["unexpected"].values())
    rows = [
        (
            "requests",
            f"{requests['finished']:,} finished, {requests['cancelled']} cancelled, {requests['refused']} refused",
        ),
        (
            "unexpected errors",
            f"{unexpected}" + "".join(f"\n  {text}: {n}" for text, n in requests["unexpected"].items()),
        ),
        (
            "canary prompt",
            f"sent {report['canary']['asked']} times; its answer changed {report['canary']['changed']} times",
        ),
        ("output rate", f"{report['tokens_per_s']:,.1f} tokens/s"),
        (
            "memory slope",
            f"{mib(memory['slope_bytes_per_minute'])} per minute ± {mib(memory['slope_standard_error'])}; "
            f"from {mib(memory['first_bytes'])} to {mib(memory['last_bytes'])}",
        ),
    ]
    for name, title in (("ttft_p99_s", "P99 time to first token"), ("inter_token_p99_s", "P99 time between tokens")):
        first, last = report["first_minute"][name], report["last_minute"][name]
        rows.append((title, f"{ms(first)} in the first minute, {ms(last)} in the last ({ratios[name]:.2f} x)"))
    rows.append(("still held at the end", ", ".join(f"{name} {count}" for name, count in report["left"].items())))
    return facts(rows)


SOAK = Benchmark(
    "soak",
    "Runs a mixed load for minutes and measures what grows: memory, latencies, held resources.",
    SoakConfig,
    prepare,
    measure,
    table,
)
