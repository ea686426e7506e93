"""`allspan bench overload`: far more requests than the queue takes, all at once, then all of them cancelled.

Each repeat: goodput (tokens that reach a steady number of callers), the burst, goodput again. What comes back beside
the ratio: how many were refused and with which advice, and pages and memory of the ranks when all is over. All pages
are used once before, and a burst that is not counted goes before, so that what is used for the first time is no growth.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from allspan.client.bench.benchmark import Benchmark, Options, Report, at_least, with_context
from allspan.client.bench.load import ask, fill, greedy, random_prompt, spread
from allspan.client.bench.machine import resident_bytes
from allspan.client.bench.report import columns, facts, mib
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import AllspanError, DeadlineExceeded, QueueFull
from allspan.protos.api.results import RequestHandle
from allspan.protos.config.settings import SchedulerConfig

IDLE_TIMEOUT_S = 120.0
POLL_S = 0.05


@dataclass(frozen=True)
class OverloadConfig:
    """The load of the overload benchmark, and the requests that goodput is measured with."""

    factor: int = 10
    """Sets the requests of a burst, as a multiple of --max-queued-requests."""
    input_len: int = 32
    """Sets the prompt tokens of each request; they are drawn at random."""
    output_len: int = 32
    """Sets the new tokens of each request of the steady load; those of a burst ask for eight times as many."""
    concurrency: int = 16
    """Sets the callers of the steady load; each sends its next request when the last one has ended."""
    seconds: float = 10.0
    """Sets the seconds of steady load before and after each burst; the first tenth is not counted."""
    repeats: int = 3
    """Sends this many bursts."""
    seed: int = 0
    """Seeds the generator of the random prompts."""

    def __post_init__(self) -> None:
        least = {"factor": 2, "input_len": 1, "output_len": 1, "concurrency": 1, "seconds": 0.1, "repeats": 1}
        at_least(self, least)

    @property
    def burst_len(self) -> int:
        """New tokens that a request of a burst asks for: more than it gets before it is cancelled."""
        return 8 * self.output_len


def prepare(config: OverloadConfig, options: Options) -> Options:
    return with_context(options, config.input_len + config.burst_len, "--input-len + 8 x --output-len")


def measure(engine: ClientEngine, config: OverloadConfig, options: Options) -> Report:
    limit = options.get("max_queued_requests") or SchedulerConfig().max_queued_requests
    return asyncio.run(_measure(engine, config, limit))


async def _measure(engine: ClientEngine, config: OverloadConfig, limit: int) -> Report:
    draw = random.Random(config.seed)
    await fill(engine)
    await _burst(engine, config, config.factor * limit, draw)
    baseline = await _idle(engine)
    bursts = []
    for _ in range(config.repeats):
        before = await _goodput(engine, config, draw)
        burst = await _burst(engine, config, config.factor * limit, draw)
        idle = await _idle(engine)
        after = await _goodput(engine, config, draw)
        bursts.append(burst | idle | {"before_tokens_per_s": before, "after_tokens_per_s": after})
    return {
        "queue_limit": limit,
        "baseline": baseline,
        "bursts": bursts,
        "goodput_ratio": spread([burst["after_tokens_per_s"] / burst["before_tokens_per_s"] for burst in bursts]),
        "pages_kept": max(burst["pages_used"] for burst in bursts),
        "resident_growth_bytes": sum(bursts[-1]["resident_bytes"]) - sum(baseline["resident_bytes"]),
    }


async def _burst(engine: ClientEngine, config: OverloadConfig, count: int, draw: random.Random) -> Report:
    """Sends `count` requests at once, waits until each is taken or refused, and cancels those that were taken."""
    prompt = random_prompt(draw, engine, config.input_len)
    prompts = [[*prompt[:-1], place % engine.cluster.vocab_size] for place in range(count)]
    params = greedy(config.burst_len)
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(engine.astart_request(prompt, params) for prompt in prompts), return_exceptions=True
    )
    answered = time.perf_counter()
    taken: list[RequestHandle] = []
    refusals: list[QueueFull] = []
    others: Counter[str] = Counter()
    for answer in answers:
        if isinstance(answer, QueueFull):
            refusals.append(answer)
        elif isinstance(answer, AllspanError):
            others[f"{type(answer).__name__}: {answer.message[:120]}"] += 1
        elif isinstance(answer, BaseException):
            raise answer
        else:
            taken.append(answer[0])
    await asyncio.gather(*(engine.astop_request(handle) for handle in taken))
    for handle in taken:
        engine.release_request(handle)
    return {
        "sent": count,
        "taken": len(taken),
        "refused": len(refusals),
        "told_to_come_back": sum("try again" in refusal.message for refusal in refusals),
        "failed": dict(others),
        "answered_s": answered - started,
        "cancelled_s": time.perf_counter() - answered,
    }


async def _idle(engine: ClientEngine) -> Report:
    """The engine's state once nothing runs or waits. DeadlineExceeded when that does not come."""
    started = time.perf_counter()
    while (facts := await engine.astatistics()).running + facts.waiting:
        if time.perf_counter() - started > IDLE_TIMEOUT_S:
            raise DeadlineExceeded(
                f"{facts.running} requests run and {facts.waiting} wait long after they were cancelled"
            )
        await asyncio.sleep(POLL_S)
    return {
        "idle_after_s": time.perf_counter() - started,
        "pages_used": facts.pages_used,
        "pages_cached": facts.pages_cached,
        "pages_free": facts.pages_free,
        "pages_total": facts.pages_total,
        "resident_bytes": resident_bytes(facts),
    }


async def _goodput(engine: ClientEngine, config: OverloadConfig, draw: random.Random) -> float:
    """Returns the tokens per second that reach the callers of the steady load."""
    begun = time.perf_counter() + config.seconds / 10
    count = 0

    def seen(num_tokens: int) -> None:
        nonlocal count
        count += num_tokens if time.perf_counter() > begun else 0

    async def caller() -> None:
        while True:
            prompt = random_prompt(draw, engine, config.input_len)
            await ask(engine, prompt, greedy(config.output_len), seen=seen)

    callers = [asyncio.ensure_future(caller()) for _ in range(config.concurrency)]
    done, _ = await asyncio.wait(callers, timeout=1.1 * config.seconds, return_when=asyncio.FIRST_EXCEPTION)
    seconds, tokens = time.perf_counter() - begun, count
    for task in callers:
        task.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    for task in done:
        task.result()
    await _idle(engine)
    return tokens / seconds


def table(report: Report) -> str:
    heading = (
        "burst",
        "taken",
        "refused",
        "with Retry-After",
        "failed",
        "time to answer all",
        "KV pages used",
        "memory",
        "goodput after/before",
    )
    rows: list[Sequence[str]] = [heading]
    for number, burst in enumerate(report["bursts"], start=1):
        counts = [str(burst[name]) for name in ("taken", "refused", "told_to_come_back")]
        ratio = burst["after_tokens_per_s"] / burst["before_tokens_per_s"]
        rows.append(
            (
                *(f"{number} of {burst['sent']}", *counts, str(sum(burst["failed"].values()))),
                *(f"{burst['answered_s']:.1f} s", f"{burst['pages_used']}/{burst['pages_total']}"),
                *(mib(sum(burst["resident_bytes"])), f"{ratio:.3f}"),
            )
        )
    ratio = report["goodput_ratio"]
    return f"{columns(rows)}\n\n" + facts(
        [
            ("goodput after / before", f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"),
            ("KV pages still used", str(report["pages_kept"])),
            ("memory growth", mib(report["resident_growth_bytes"])),
        ]
    )


OVERLOAD = Benchmark(
    "overload",
    "Measures a server that gets far more requests than its queue takes.",
    OverloadConfig,
    prepare,
    measure,
    table,
)
