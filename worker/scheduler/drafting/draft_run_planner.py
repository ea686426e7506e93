"""DraftRunPlanner: plans the runs of a drafter in the ranks, which follow a step.

It is asked for as many drafts as make tokens a second most, its own time counted, and for none where it does not pay:
then it falls behind, and takes in what it lacks when it is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from allspan.worker.scheduler.drafting.costs import GAIN, StepCosts
from allspan.worker.scheduler.drafting.rank_drafts import RankDrafts
from allspan.worker.scheduler.owned_pages import OwnedPages
from allspan.worker.scheduler.page_manager import PageManager
from allspan.worker.scheduler.plan import Grant, StepPlan, StepResult
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.step_builder import StepBuilder
from allspan.worker.step.rank_drafter import DraftRun

LEAST_CHANCE = 0.3
"""Requests whose first draft is less likely to be kept are not drafted for, but in a trial."""
EXPECTED_LEFT = 256
"""Tokens that are still expected of a request at most: over these it takes in what it lacks."""
FIRST_TRIALS, TRIAL_SHARE, TRIAL_DRAFTS = 3, 0.01, 3
"""A drafter that does not seem to pay is tried at first so often: what else the machine did may have misled its timing.
Later it is tried once that takes no more than this share of the time without; each time for so many drafts."""
_FAST, _FARTHEST = 0.2, 0.7

Chances = Callable[[Request, int], Sequence[float]]
"""The chance of each of the first drafts of a request, at most so many, those before it being kept."""


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the leader knows of a drafter in the ranks."""

    max_model_len: int
    seconds: Mapping[int, float] = field(default_factory=dict)
    """What its steps take by their tokens."""
    follows: bool = False
    """See `allspan.worker.step.rank_drafter.RankDrafter.follows`."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A request that may be drafted for."""

    request: Request
    most: int
    """The most drafts that it can use."""
    total: int
    """Its tokens when the step is over, if all of the step's drafts are kept."""
    chances: Sequence[float]
    left: float
    """Tokens that are still expected of it."""

    @property
    def behind(self) -> int:
        """Tokens that the drafter has not taken in."""
        return self.total - self.request.num_drafted


class DraftRunPlanner:
    """Fills a step's draft runs, and learns what they take."""

    def __init__(
        self, drafts: RankDrafts, most: int, most_tokens: int, drafter: DrafterFacts, costs: StepCosts | None
    ) -> None:
        """`most` drafts of a request in a step; `most_tokens` of a step. `costs` of the model that verifies; None: all
        that can be drafted is asked for, whether it pays or not."""
        self.drafts = drafts
        self._most = most
        self._most_tokens = most_tokens
        self._max_model_len, self._follows = drafter.max_model_len, drafter.follows
        self._costs = costs
        self._drafter = StepCosts(drafter.seconds, most_tokens) if costs else None
        self._speed: float | None = None
        """A logarithm: what the drafter needs beside what was measured; None: it has not run yet."""
        self._unasked_s = 0.0
        """Seconds of steps since the last one behind which something was drafted."""
        self._num_trials = 0
        self._length = float(EXPECTED_LEFT)
        """Tokens of an answer, as they have been lately: many end long before they have all that they ask for."""

    def fill(
        self,
        step: StepBuilder,
        memory: PageManager | OwnedPages,
        running: Sequence[Request],
        verifies: Callable[[Request], bool],
        chances: Chances,
    ) -> list[Grant]:
        """Asks for drafts behind the step, for requests that it decodes. Returns the pages that they take."""
        candidates, count = self._candidates(step, verifies, chances), self._most
        if self._costs:
            candidates, count = self._worthwhile(candidates, len(step.sampled), step.budget)
        grants: list[Grant] = []
        budget = step.budget
        for candidate in candidates if count else ():
            request, taken = candidate.request, candidate.behind if self._follows else min(candidate.behind, budget)
            drafts = min(count, candidate.most) if taken == candidate.behind else 0
            places = candidate.total + drafts - 1 if drafts else request.num_drafted + taken
            pages = memory.extend_for_drafter(request, places, running) if taken else None
            if pages is not None:
                grants += pages
                budget -= taken
                step.draft_runs.append(DraftRun(request.row, request.num_drafted, taken, drafts))
        return grants

    def must_wait(self, running: Sequence[Request], verifies: Callable[[Request], bool], chances: Chances) -> bool:
        """Whether drafts would be asked for behind the next step, were it planned when the steps in flight are over."""
        for request in running if self._follows else ():
            request.num_drafted = request.num_computed
        found = (self._candidate(each, 2, verifies, chances) for each in running if each.num_unknown)
        candidates = [candidate for candidate in found if candidate]
        if self._costs is None or not candidates:
            return bool(candidates)
        plain_s = self._costs.seconds(len(candidates), False)
        if self._most_useful(_likely(candidates), len(candidates), plain_s):
            return True
        self._unasked_s += plain_s
        return self._due_trial(candidates) is not None

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """The draft runs of a step have taken `result.draft_s`."""
        if self._costs is None or not result.drafted or result.draft_s <= 0:
            return
        taken = sum(result.drafted[run.row].num_tokens - run.first for run in plan.draft_runs)
        if not taken:  # of no request could the drafter take in what follows
            return
        depths = [len(result.drafted[run.row].drafts) for run in plan.draft_runs]
        error = math.log(result.draft_s / self._seconds(taken, depths))
        if self._speed is None:
            self._speed = error
        else:
            self._speed += _FAST * min(max(error, -_FARTHEST), _FARTHEST)

    def ended(self, request: Request) -> None:
        """The request has ended: others' answers may be as long."""
        if count := len(request.output_token_ids):
            self._length += _FAST * (min(count, EXPECTED_LEFT) - self._length)

    def _candidates(self, step: StepBuilder, verifies: Callable[[Request], bool], chances: Chances) -> list[_Candidate]:
        """The requests that the step decodes and that may be drafted for behind it."""
        found = []
        for request, run in zip(step.requests, step.runs, strict=True):
            if run.num_tokens != 1 + len(step.drafts.get(run.row, ())) or not request.num_unknown:
                continue
            if self._follows:
                request.num_drafted = request.num_computed
            if candidate := self._candidate(request, run.num_tokens, verifies, chances):
                found.append(candidate)
        return found

    def _candidate(
        self, request: Request, count: int, verifies: Callable[[Request], bool], chances: Chances
    ) -> _Candidate | None:
        """A request that has `count` tokens more when it is drafted for; None where it cannot be."""
        total = request.num_tokens + count
        left = request.max_tokens - len(request.output_token_ids)
        most = min(self._most, left - 2, self._max_model_len - total)  # but for that token, and one behind the drafts
        has_ids = request.embeddings is None and request.positions is None
        if most <= 0 or not (has_ids and verifies(request)) or self.drafts.refuses(request):
            return None
        return _Candidate(request, most, total, chances(request, most) if self._costs else (), min(left, self._length))

    def _worthwhile(self, candidates: Sequence[_Candidate], rows: int, budget: int) -> tuple[list[_Candidate], int]:
        """For which requests drafts are asked for in a step of so many `rows`, and how many for each. `budget`: tokens
        that the drafter may take in."""
        assert self._costs is not None
        likely = _likely(candidates)
        plain_s = self._costs.seconds(rows, False)
        if count := self._most_useful(likely, rows, plain_s):
            self._unasked_s = 0.0
            return likely, count
        self._unasked_s += plain_s
        if nearest := self._due_trial(candidates):
            self._num_trials += 1
            # A trial of several steps goes on with what is left of its time.
            part_s = self._seconds(budget, ()) if budget < nearest.behind else self._unasked_s
            self._unasked_s = max(0.0, self._unasked_s - part_s / TRIAL_SHARE)
            return [nearest], TRIAL_DRAFTS
        return [], 0

    def _most_useful(self, candidates: Sequence[_Candidate], rows: int, plain_s: float) -> int:
        """How many drafts a request make tokens a second most."""
        assert self._costs is not None
        if not candidates:
            return 0
        behind, left = (
            sum(candidate.behind for candidate in candidates),
            sum(candidate.left for candidate in candidates),
        )
        best, count = GAIN * rows / plain_s, 0
        kept, tokens, expected = [1.0] * len(candidates), rows, float(rows)
        for depth in range(self._most):
            for i, candidate in enumerate(candidates):
                if depth < min(len(candidate.chances), candidate.most):
                    kept[i] *= candidate.chances[depth]
                    expected += kept[i]
                    tokens += 1
            if tokens < rows + depth + 1:  # no request has so many
                break
            depths = [min(depth + 1, candidate.most) for candidate in candidates]
            steady = len(candidates) + round(expected - rows)
            seconds = self._costs.seconds(tokens, True) + self._seconds(steady, depths)
            if behind > 2 * steady:
                late_s = self._seconds(behind, ()) - self._seconds(steady, ())
                seconds += late_s * min(1.0, expected / left)
            if expected / seconds > best:
                best, count = expected / seconds, depth + 1
        return count

    def _due_trial(self, candidates: Sequence[_Candidate]) -> _Candidate | None:
        """The request for which drafts are tried, if it is time for that."""
        nearest = min(candidates, key=lambda candidate: candidate.behind, default=None)
        if nearest is None or self._num_trials < FIRST_TRIALS:
            return nearest
        trial_s = self._seconds(nearest.behind, [TRIAL_DRAFTS])
        return nearest if trial_s <= TRIAL_SHARE * self._unasked_s else None

    def _seconds(self, taken: int, depths: Sequence[int]) -> float:
        """What it takes to take in so many tokens and to draft so many for each request."""
        assert self._drafter is not None
        whole, rest = divmod(taken, self._most_tokens)
        later = [sum(depth > i for depth in depths) for i in range(1, max(depths, default=0))]
        steps = [self._most_tokens] * whole + [rest] * bool(rest) + later
        return sum(self._drafter.seconds(tokens, False) for tokens in steps) * math.exp(self._speed or 0.0)


def _likely(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """The candidates whose first draft is likely enough."""
    return [candidate for candidate in candidates if candidate.chances[0] >= LEAST_CHANCE]
