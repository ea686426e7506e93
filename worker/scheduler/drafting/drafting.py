"""Drafting: drafts for the decodes of a step, and what is learnt from them.

Replay verification: at every drafted position the sampler draws the token that it draws without drafts, by the same
(seed, position); the longest prefix of drafts that agrees is kept, and the first token that differs replaces its draft.
Whatever a drafter proposes, a request's tokens do not change. Drafts are run where they are expected to pay: see
`StepCosts.most_useful`.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence

from allspan.protos.api.errors import InternalError
from allspan.protos.config.speculation import Speculation
from allspan.worker.scheduler.counters import SchedulerCounters
from allspan.worker.scheduler.drafting.acceptance import Acceptance, Proposed
from allspan.worker.scheduler.drafting.backoff import LookupBackoff
from allspan.worker.scheduler.drafting.costs import TRIAL_CHANCE, TRIAL_DRAFTS, StepCosts
from allspan.worker.scheduler.drafting.draft_run_planner import DraftRunPlanner
from allspan.worker.scheduler.drafting.drafter import Draft, Drafter
from allspan.worker.scheduler.drafting.forced import ForcedTokens
from allspan.worker.scheduler.drafting.rank_drafts import RankDrafts, kind_of
from allspan.worker.scheduler.lookahead import Flight
from allspan.worker.scheduler.owned_pages import OwnedPages
from allspan.worker.scheduler.page_manager import PageManager
from allspan.worker.scheduler.plan import Grant, StepResult
from allspan.worker.scheduler.request import Request, RequestStatus
from allspan.worker.scheduler.step_builder import StepBuilder

_LEAST_LIKELY = 0.2
"""Nothing is looked for behind drafts that are kept less often, all of them."""


class Drafting:
    """Drafts of a scheduler's requests."""

    def __init__(
        self,
        asked: Speculation,
        drafters: Sequence[Drafter],
        vocab_size: int,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
        run_planner: DraftRunPlanner | None = None,
    ) -> None:
        """`costs` None: everything that is proposed is run, whether it pays or not. `run_planner`: for what one of the
        drafters, RankDrafts, hands on."""
        self._most = asked.num_speculative_tokens
        self._least_chance = asked.suffix_decoding_min_token_prob
        self._drafters = drafters
        self._grammars = next((each for each in drafters if isinstance(each, ForcedTokens)), None)
        self._run_planner = run_planner
        self._vocab_size = vocab_size
        self._costs = costs
        self._acceptance = Acceptance(drafters)
        self._proposed: dict[bytes, list[Proposed]] = {}
        """What was proposed behind the tokens that are known, by request: the step that is over next judges it."""
        self._clock = clock
        self._began_at = self._learnt_at = 0.0
        self._skips = False
        """No drafts are looked for in the step that is planned."""
        self._backoff = LookupBackoff()

    def fill(self, step: StepBuilder, memory: PageManager | OwnedPages, running: Sequence[Request]) -> list[Grant]:
        """Adds drafts to the step's decodes, with what is left of its budgets, and where drafts are made in the ranks
        asks for those of the next step. Returns their pages. A step that is planned ahead gets none: its requests' last
        tokens are not known."""
        if step.is_ahead:
            return []
        self._began_at = self._clock()  # also of a step without drafts: where others follow it, its time is learnt
        self._skips = not any(map(self._may_draft, step.requests)) or (
            self._costs is not None and self._backoff.may_skip(step)
        )
        if self._skips:
            return []
        self._proposed.clear()
        grants = self._add_drafts(step, memory, running)
        if self._run_planner and memory.can_retract:
            grants += self._run_planner.fill(step, memory, running, self._may_draft, self._chances)
        if self._costs:
            self._backoff.record(self._clock() - self._began_at, self._costs.seconds(len(step.runs), False))
        if step.draft_runs:
            self._backoff.reset()
        return grants

    def _add_drafts(
        self, step: StepBuilder, memory: PageManager | OwnedPages, running: Sequence[Request]
    ) -> list[Grant]:
        grants: list[Grant] = []
        if not memory.can_retract:
            return grants
        tokens, expected = sum(run.num_tokens for run in step.runs), float(len(step.sampled))
        is_trial = self._costs is not None and self._costs.begin_trial()
        if self._costs and not (is_trial or self._costs.can_gain(tokens, expected)):
            return grants
        found: list[tuple[int, list[Proposed]]] = []
        gains: list[list[float]] = []
        for index, (request, run) in enumerate(zip(step.requests, step.runs, strict=True)):
            most = self._most_of(request, step) if run.num_tokens == 1 else 0
            if most > 0 and (proposed := self._propose(request, most)):
                self._proposed[request.request_id] = proposed
                found.append((index, proposed))
                gains.append(self._gains(request, proposed))
        counts = self._useful(gains, tokens, expected, step.room, is_trial)
        for (index, proposed), useful in zip(found, counts, strict=True):
            if count := min(useful, step.room):
                count, pages = memory.extend_for_drafts(step.requests[index], count, running)
                grants += pages
            if count:
                step.draft(index, tuple(each.draft.token for each in proposed[:count]))
        return grants

    def must_wait(self, memory: PageManager | OwnedPages, running: Sequence[Request]) -> bool:
        """Whether the steps in flight are to be awaited before the next one is planned, as drafts behind their tokens
        would pay. That is told from what is proposed behind the tokens that are known: of these drafts the first stands
        for the token that is on its way, and those behind it count if it is right; where there are none, another one of
        its kind will be proposed then. So it is if drafts are to be made in the ranks behind the next step."""
        self._skips = False
        count = sum(request.num_unknown > 0 for request in running)
        is_trial = self._costs is not None and self._costs.is_trial_due
        if not (memory.can_retract and count):
            return False
        if self._costs and not (is_trial or self._costs.can_gain(count, count)):
            return False
        self._proposed.clear()
        gains: list[list[float]] = []
        for request in running:
            most = min(self._most + 1, self._most_more(request)) if request.num_unknown else 0
            if most > 1 and (proposed := self._propose(request, most)):
                self._proposed[request.request_id] = proposed
                first, *behind = self._gains(request, proposed) or [0.0]
                gains.append(behind or [first * first])
        pays = any(self._useful(gains, count, count, self._most * count, is_trial))
        if self._run_planner and not pays:
            pays = self._run_planner.must_wait(running, self._may_draft, self._chances)
        if pays:
            self._backoff.reset()
        return pays

    def take(self, flight: Flight, result: StepResult, memory: PageManager | OwnedPages) -> None:
        """Takes in what was drafted in the ranks behind a step, whose tokens the requests have by now."""
        if self._run_planner is None:
            raise InternalError("tokens were drafted in the ranks that nobody asked for")
        requests = {run.row: request for run, request in zip(flight.plan.runs, flight.requests, strict=True)}
        for run in flight.plan.draft_runs:
            request, drafted = requests[run.row], result.drafted[run.row]
            if request.status is RequestStatus.RUNNING:
                request.num_drafted = drafted.num_tokens
                memory.commit_drafted(request, len(drafted.drafts))
                self._run_planner.drafts.take(request, drafted, run.first)

    def learn(self, flight: Flight, result: StepResult, counters: SchedulerCounters) -> None:
        """The oldest step in flight has made these tokens of its rows just now."""
        began = self._learnt_at if flight.plan.in_flight else self._began_at  # one ahead waits for the one before
        self._learnt_at = self._clock()
        if self._skips:
            return
        plan, drafted, tokens = flight.plan, dict(flight.plan.drafts), result.tokens
        for request, run in zip(flight.requests, plan.runs, strict=True) if self._proposed else ():
            made = tokens.get(run.row, ())
            if run.row in drafted and made:
                counters.count_drafts(len(drafted[run.row]), len(made) - 1)
            if made and (proposed := self._proposed.get(request.request_id)):
                self._acceptance.learn(request, proposed, made)
        self._proposed.clear()
        count = sum(run.num_tokens for run in plan.runs)
        num_drafts = sum(map(len, drafted.values()))
        if self._costs and count == len(plan.runs) + num_drafts:
            self._costs.learn(count, bool(drafted), self._learnt_at - began - result.draft_s)
            num_kept = sum(len(tokens[row]) - 1 for row in drafted if tokens.get(row))
            self._backoff.learn(self._costs.saved(len(plan.runs), num_drafts, num_kept))
        if self._run_planner:
            self._run_planner.learn(plan, result)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        for drafter in self._drafters:
            drafter.forget(request)
        if self._run_planner:
            self._run_planner.ended(request)
        self._acceptance.forget(request)
        self._proposed.pop(request.request_id, None)

    def _most_of(self, request: Request, step: StepBuilder) -> int:
        """The most drafts that the request can have in a step, if it gets a token in it at all."""
        most = self._most_more(request) if request.num_unknown else 0
        return min(step.room, step.most_chunk - 1, self._most, most)

    def _most_more(self, request: Request) -> int:
        """Drafts that the request's last token may have behind it."""
        if not self._may_draft(request):
            return 0
        return request.max_tokens - len(request.output_token_ids) - 1

    def _may_draft(self, request: Request) -> bool:
        return request.options.speculation

    def _chances(self, request: Request, most: int) -> list[float]:
        """The chances of drafts that are made in the ranks."""
        number = next(i for i, each in enumerate(self._drafters) if isinstance(each, RankDrafts))
        return self._acceptance.chances(request, (Proposed(Draft(0, kind_of(i)), number) for i in range(most)))

    def _propose(self, request: Request, most: int) -> list[Proposed]:
        """What the drafters propose, up to an id that cannot be. In a grammar they go on behind each other, as long as
        that is likely enough: what it forces follows what it does not."""
        found = self._possible(request, (), self._offer(request, (), most))
        count = 0
        while request.grammar is not None and count < len(found) < most:
            if math.prod(self._acceptance.chances(request, found)) < _LEAST_LIKELY:
                break
            count, before = len(found), [each.draft.token for each in found]
            found += self._possible(request, before, self._offer(request, before, most - count))
        return found

    def _offer(self, request: Request, before: Sequence[int], most: int) -> list[Proposed]:
        """What one of the drafters proposes behind the tokens `before`: the one whose first draft is the likeliest."""
        offers: list[list[Proposed]] = []
        for number, drafter in enumerate(self._drafters):
            if drafts := drafter.propose(request, before, most)[:most]:
                offers.append([Proposed(draft, number) for draft in drafts])
        if len(offers) < 2:
            return offers[0] if offers else []
        return max(offers, key=lambda offer: self._acceptance.chances(request, offer[:1])[0])

    def _possible(self, request: Request, before: Sequence[int], proposed: list[Proposed]) -> list[Proposed]:
        """Returns those of the drafts behind `before`, from the first on, that the vocabulary has and the grammar lets
        through."""
        size = self._vocab_size
        tokens = [each.draft.token for each in proposed]
        bad = next((i for i, token in enumerate(tokens) if not 0 <= token < size), len(tokens))
        if self._grammars and request.grammar is not None and bad:
            bad = self._grammars.accepted(request, [*before, *tokens[:bad]]) - len(before)
        return proposed[: max(bad, 0)]

    def _gains(self, request: Request, proposed: Sequence[Proposed]) -> list[float]:
        """How likely it is that each of these drafts is kept, with all before it: the tokens that it should add.
        Of the first ones alone where the others are too unlikely to be run."""
        chances, least = self._acceptance.chances(request, proposed), self._least_chance
        count = next((i for i, chance in enumerate(chances) if chance < least), len(chances)) if least else len(chances)
        return list(itertools.accumulate(chances[:count], operator.mul))

    def _useful(
        self, gains: Sequence[Sequence[float]], tokens: int, expected: float, room: int, is_trial: bool
    ) -> list[int]:
        """How many drafts of each request, whose `gains` these are, are run in a step that has so many tokens without
        them: the likeliest ones of all, `room` at most."""
        if self._costs is None:
            return [len(each) for each in gains]
        likeliest = sorted((-gain, number) for number, each in enumerate(gains) for gain in each)[:room]
        count = self._costs.most_useful([-gain for gain, _ in likeliest], tokens, expected)
        counts = Counter(number for _, number in likeliest[:count])
        if is_trial and not count:
            tried = next((number for number, each in enumerate(gains) if each and each[0] >= TRIAL_CHANCE), None)
            counts = Counter() if tried is None else Counter({tried: min(len(gains[tried]), TRIAL_DRAFTS)})
        return [counts[number] for number in range(len(gains))]
