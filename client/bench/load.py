"""Requests as benchmarks send them, on this process's clock."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from allspan.client.engine import ClientEngine
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import RequestTimings
from allspan.protos.api.sampling import SamplingParams


@dataclass(frozen=True)
class Answer:
    """The times and tokens of one finished request."""

    started: float
    """The time of sending, `time.perf_counter()`."""
    arrivals: tuple[float, ...]
    """The arrival time of each token."""
    token_ids: tuple[int, ...]
    finish_reason: str
    timings: RequestTimings | None

    @property
    def ttft_s(self) -> float:
        """The seconds to the first token; at least one token must have come."""
        return self.arrivals[0] - self.started

    @property
    def gaps_s(self) -> list[float]:
        """The seconds between one message with tokens and the next."""
        moments = sorted(set(self.arrivals))
        return [later - earlier for earlier, later in itertools.pairwise(moments)]


async def ask(
    engine: ClientEngine,
    prompt: Sequence[int],
    params: SamplingParams,
    options: RequestOptions | None = None,
    cancel_after: int | None = None,
    seen: Callable[[int], None] | None = None,
) -> Answer:
    """Sends one request and reads it to its end; `cancel_after` stops it once so many tokens have come, `seen` is
    called with each message's number of tokens.

    Raises the request's error. When the caller is cancelled, so is the request.
    """
    started = time.perf_counter()
    handle, queue = await engine.astart_request(prompt, params, options=options)
    arrivals: list[float] = []
    token_ids: list[int] = []
    reason, timings = "", None
    try:
        while (output := await queue.aget()) is not None:
            arrivals += [time.perf_counter()] * len(output.token_ids)
            token_ids += output.token_ids
            if seen is not None:
                seen(len(output.token_ids))
            reason, timings = output.finish_reason, output.timings or timings
            if cancel_after is not None and len(token_ids) >= cancel_after:
                cancel_after = None
                await engine.astop_request(handle)
    finally:
        if not queue.state.is_final:
            engine.release_request(handle)
    return Answer(started, tuple(arrivals), tuple(token_ids), reason, timings)


async def fill(engine: ClientEngine) -> None:
    """Uses every KV page once: memory that the kernel assigns at first use does not count as growth after that."""
    draw = random.Random("fill")
    facts = await engine.astatistics()
    length = facts.max_model_len - 1
    count = -(-facts.filling_tokens // length)
    await engine.agenerate([random_prompt(draw, engine, length) for _ in range(count)], greedy(1))


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    """Returns parameters for exactly `max_tokens` tokens, always the same ones."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0, **fields)


def random_prompt(draw: random.Random, engine: ClientEngine, length: int) -> list[int]:
    return [draw.randrange(engine.cluster.vocab_size) for _ in range(length)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, the least and the most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that at least `percent` % of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)] if ordered else 0.0
