"""Lookahead (asynchronous scheduling): steps are planned while others are in flight, so that a device need not wait for
the host. At most `depth` steps are in flight; a row of a later one may run a token that an earlier one still samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allspan.protos.api.sampling import SamplingParams
from allspan.worker.scheduler.plan import StepPlan
from allspan.worker.scheduler.request import Request

DEPTH = 2
"""Steps in flight on a device that runs beside the host: one that runs, and one that waits for it."""

BATCHES_A_STAGE = 2
"""Batches in a pipeline for each of its stages, unasked: while one of them is computed, the other one is on its way."""

SamplesAhead = Callable[[SamplingParams], bool]
"""Whether a request's next token can be sampled before its last one is known on the host."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was planned and whose tokens are not known yet."""

    plan: StepPlan
    requests: Sequence[Request]
    """The requests of the plan's runs, in their order. Some may have ended since."""
    may_be_followed: bool
    """Whether a step may be planned before this one's tokens are known."""


class Lookahead:
    """The steps in flight, and the only rules on when another one may be planned behind them.

    A step that is planned ahead preempts no request and takes in none that needs its last token on the host: when it
    would have to, the steps in flight are awaited first.
    """

    def __init__(self, depth: int = 1, samples_ahead: SamplesAhead = lambda params: False) -> None:
        """`depth` 1: every step is planned when the one before is over (the plain loop)."""
        self.depth = depth
        self._samples_ahead = samples_ahead
        self._flights: deque[Flight] = deque()
        self._synchronous: set[bytes] = set()
        """Running requests that need their last token on the host before the next one is sampled."""

    def __len__(self) -> int:
        return len(self._flights)

    def may_plan(self) -> bool:
        """Whether a step can be planned now. Behind a step that samples nothing none is planned early: no request
        waits for it, so the next plan, which newcomers may join, comes at once anyway."""
        flights = self._flights
        return not flights or (flights[-1].may_be_followed and not self._synchronous)

    def may_run(self, request: Request) -> bool:
        """Whether a running request may be in the step that is being planned."""
        return True

    def most_decodes(self, num_running: int) -> int:
        """The most requests of `num_running` whose next token a step may compute."""
        return num_running

    def may_join(self, request: Request) -> bool:
        """Whether a waiting request may join the step that is being planned."""
        return not self._flights or self._samples_ahead(request.params)

    def join(self, request: Request) -> None:
        """The request runs from now on."""
        if self.depth > 1 and not self._samples_ahead(request.params):
            self._synchronous.add(request.request_id)

    def leave(self, request: Request) -> None:
        """The request does not run any more."""
        self._synchronous.discard(request.request_id)

    def launch(self, plan: StepPlan, requests: Sequence[Request], samples: bool) -> None:
        """A step has been planned for `requests`, those of its runs; `samples`: some of them get a token."""
        can_follow = samples and not (self._synchronous or plan.drafts or plan.draft_runs)
        self._flights.append(Flight(plan, requests, can_follow))

    def land(self, step: int) -> Flight | None:
        """The oldest step in flight, which is over; None when it is not `step`."""
        if not self._flights or self._flights[0].plan.step != step:
            return None
        return self._flights.popleft()


class PipelineLookahead(Lookahead):
    """The rules for the stages of a pipeline: a step is planned behind others of which it needs no token. So it has the
    decodes of requests that are in no other, an even share of all; and chunks of prompts, one behind the other."""

    def may_plan(self) -> bool:
        return True

    def may_run(self, request: Request) -> bool:
        return not request.num_unknown

    def most_decodes(self, num_running: int) -> int:
        return -(-num_running // self.depth)

    def may_join(self, request: Request) -> bool:
        return True

    def join(self, request: Request) -> None:
        """Whatever it asks for, its last token is known before the next one is sampled."""
