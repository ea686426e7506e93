"""What the scheduler counts."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from allspan.protos.api.counters import STEP_TOKENS_BOUNDS, EngineCounters
from allspan.worker.scheduler.plan import Run
from allspan.worker.scheduler.request import Request

WINDOW_S = 10.0


class Throughput:
    """Prompt tokens that were taken in and tokens that were generated, a second."""

    def __init__(self) -> None:
        self.prompt, self.generation = Rate(), Rate()

    def per_second(self, now: float) -> tuple[float, float]:
        """Returns the rates of prompt tokens and of generated tokens."""
        return self.prompt.per_second(now), self.generation.per_second(now)


class Rate:
    """Things a second over the last WINDOW_S seconds, or since the first if that is less."""

    def __init__(self) -> None:
        self._seconds: deque[list[float]] = deque()
        """[when the second began, how many in it]."""

    def count(self, now: float, number: int) -> None:
        if not self._seconds or now - self._seconds[-1][0] >= 1.0:
            self._seconds.append([now, 0])
            self._forget(now)
        self._seconds[-1][1] += number

    def per_second(self, now: float) -> float:
        self._forget(now)
        if not self._seconds:
            return 0.0
        return sum(number for _, number in self._seconds) / max(now - self._seconds[0][0], 1.0)

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] < now - WINDOW_S:
            self._seconds.popleft()


@dataclass(slots=True, kw_only=True)
class SchedulerCounters(EngineCounters):
    """The counters of an engine that the scheduler raises; the others keep their defaults here."""

    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS_BOUNDS) + 1))
    accepted_per_position: list[int] = field(default_factory=list)
    throughput: Throughput = field(default_factory=Throughput)

    def count_join(self, request: Request, looks_up: bool) -> None:
        """Counts a request that runs for the first time, and what of its prompt was cached if it `looks_up` that."""
        prompt = len(request.prompt_token_ids)
        self.prompt_tokens += prompt
        if looks_up:
            self.prefix_query_tokens += prompt
            self.prefix_hit_tokens += request.cached_tokens
            self.prefix_host_hit_tokens += request.host_cached_tokens

    def count_step(self, runs: Iterable[Run]) -> None:
        """Counts a step and the tokens computed in it."""
        self.steps += 1
        if tokens := sum(run.num_tokens for run in runs):
            self.step_tokens[bisect_left(STEP_TOKENS_BOUNDS, tokens)] += 1
            self.step_tokens_sum += tokens

    def count_drafts(self, count: int, kept: int) -> None:
        """Counts a request's drafts of a step, of which the first `kept` were right."""
        self.drafts += 1
        self.draft_tokens += count
        self.accepted_tokens += kept
        counts = self.accepted_per_position
        counts += [0] * (kept - len(counts))
        for position in range(kept):
            counts[position] += 1


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do: requests, tokens that are still to be computed for them, and pages."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    pages_used: int = 0
    pages_total: int = 0
    cached_pages: int = 0
