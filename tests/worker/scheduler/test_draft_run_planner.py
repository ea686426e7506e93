"""What a drafter in the ranks is asked for, without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from allspan.worker.cache.spec import PageLifetime
from allspan.worker.scheduler.drafting.costs import StepCosts
from allspan.worker.scheduler.drafting.draft_run_planner import (
    EXPECTED_LEFT,
    FIRST_TRIALS,
    TRIAL_DRAFTS,
    DrafterFacts,
    DraftRunPlanner,
)
from allspan.worker.scheduler.drafting.rank_drafts import RankDrafts
from allspan.worker.scheduler.limits import GroupLimits, Limits
from allspan.worker.scheduler.page_manager import PageManager, PrefixHit, PrefixSettings
from allspan.worker.scheduler.plan import Run, StepPlan, StepResult
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.step_builder import StepBuilder
from allspan.worker.step.rank_drafter import Drafted, DraftRun
from support.cores import request

STEADY = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.25, 16: 1.6, 32: 2.4, 64: 4.2}


class Leader:
    """One request that decodes, and what is asked for it."""

    def __init__(self, share: float | None, prompt: int = 6, max_tokens: int = 500, **limits: int) -> None:
        """The drafter takes `share` of a step; None: its costs do not matter."""
        self.limits = Limits(97, 4096, 16, 300, 4, 1024, 9, more_groups=(GroupLimits(300, is_drafter=True),))
        self.memory = PageManager(self.limits, PrefixSettings())
        self.drafts = RankDrafts()
        facts = DrafterFacts(limits.get("max_model_len", 4096), {at: s * (share or 0) for at, s in STEADY.items()})
        self.planner = DraftRunPlanner(self.drafts, 8, 1024, facts, StepCosts(STEADY, 1024) if share else None)
        self.planner._num_trials = limits.get("trials", FIRST_TRIALS)
        self.one = request(1, range(prompt), max_tokens=max_tokens)
        self.one.row, self.one.max_tokens = 0, max_tokens
        (hit,) = self.memory.match(self.one) or ()
        assert isinstance(hit, PrefixHit)
        self.memory.join(self.one, hit)
        self.one.output_token_ids.append(5)
        self.one.num_computed = prompt

    def ask(self, chance: float, budget: int = 1024) -> DraftRun | None:
        """What is asked for behind a step of the request, whose drafts are kept with that chance."""
        step = StepBuilder(self.limits)
        self.memory.extend(self.one, 1)
        step.decode(self.one, Run(0, 1))
        step.budget = budget

        self.planner.fill(step, self.memory, [self.one], lambda request: True, _all_as_likely(chance))
        self.one.num_in_flight = self.one.num_unknown = 0
        return step.draft_runs[0] if step.draft_runs else None

    def waits(self, chance: float) -> bool:
        """Whether a step in flight is awaited for such drafts."""
        self.one.num_unknown = 1
        waits = self.planner.must_wait([self.one], lambda request: True, _all_as_likely(chance))
        self.one.num_unknown = 0
        return waits

    def go_on(self, drafted: int = -1) -> None:
        """The step is over: a token has come, and the drafter has taken in so many."""
        self.one.output_token_ids.append(5)
        self.one.num_computed += 1
        if drafted >= 0:
            self.drafts.take(self.one, Drafted(drafted), self.one.num_drafted)
            self.one.num_drafted = drafted

    def end_another(self, count: int) -> None:
        """A request ends that has got so many tokens."""
        other = request(2, [1])
        other.output_token_ids = [5] * count
        self.planner.ended(other)


def _all_as_likely(chance: float) -> Callable[[Request, int], Sequence[float]]:
    return lambda request, most: [chance] * most


def test_likely_drafts_of_a_cheap_drafter_are_asked_for_in_numbers() -> None:
    drafts = [Leader(share).ask(chance) for share in (0.02, 0.1, 0.3) for chance in (0.95, 0.7, 0.5, 0.2)]
    counts = [run.num_drafts if run else 0 for run in drafts]
    assert counts[0] == 8
    assert counts == sorted(counts[:4], reverse=True) + sorted(counts[4:8], reverse=True) + counts[8:]
    assert counts[0] >= counts[4] >= counts[8] > 0
    assert counts[3] == counts[7] == counts[11] == 0


def test_what_the_drafter_lacks_counts_by_the_tokens_that_are_still_to_come() -> None:
    assert Leader(0.3, prompt=900, max_tokens=2 * EXPECTED_LEFT).ask(0.7)
    assert not Leader(0.3, prompt=900, max_tokens=40).ask(0.7)


def test_the_tokens_that_are_still_to_come_are_those_that_others_have_got() -> None:
    leader = Leader(0.3, prompt=900, max_tokens=2 * EXPECTED_LEFT)
    for count in [9] * 12:
        leader.end_another(count)
    assert not leader.ask(0.7)
    for count in [0] * 40 + [EXPECTED_LEFT] * 12:  # those that got none had hardly begun
        leader.end_another(count)
    assert leader.ask(0.7)


def test_a_long_way_behind_takes_as_many_steps_as_it_needs() -> None:
    assert Leader(0.3, prompt=1000, max_tokens=2 * EXPECTED_LEFT).ask(0.7)
    assert not Leader(0.3, prompt=4000, max_tokens=2 * EXPECTED_LEFT).ask(0.7)


def test_it_catches_up_in_parts_that_fit_the_step() -> None:
    leader, taken = Leader(None, prompt=100), 0
    while (run := leader.ask(1.0, budget=40)) and not run.num_drafts:
        assert run == DraftRun(0, taken, 40, 0)
        taken += 40
        leader.go_on(taken)
    assert run == DraftRun(0, 80, leader.one.num_tokens + 1 - 80, 8)


def test_nothing_is_asked_for_that_cannot_be_used() -> None:
    assert not Leader(None, max_tokens=3).ask(1.0)
    assert (run := Leader(None, max_tokens=5).ask(1.0)) is not None
    assert run.num_drafts == 2
    assert not Leader(None, max_model_len=8).ask(1.0)
    leader = Leader(None)
    assert leader.ask(1.0)
    leader.go_on(0)  # it could not take in the first token
    assert not leader.ask(1.0)


def test_pages_for_drafts_leave_one_for_each_request() -> None:
    leader = Leader(None, prompt=14)
    held = leader.memory.groups[1].cache.device
    spare = held.allocate(held.num_available - 1)
    assert not leader.ask(1.0)
    held.release(spare[:1])
    assert leader.ask(1.0)
    leader.one.num_drafted = 5
    leader.memory.commit_drafted(leader.one, 12)  # keys of proposals are in the second page
    assert held.num_available == 1
    leader.memory.commit_drafted(leader.one, 2)
    assert held.num_available == 2


def test_pages_of_windows_are_told_of_and_not_those_of_a_drafter() -> None:
    limits = Limits(97, 64, 4, 16, 4, 64, 9, PageLifetime(8), (GroupLimits(16, is_drafter=True),))
    memory = PageManager(limits, PrefixSettings(enabled=True, model="model"))
    one = request(1, range(20), max_tokens=4)
    one.row = 0
    (hit,) = memory.match(one) or ()
    memory.join(one, hit)
    one.num_drafted = 8
    memory.commit_drafted(one, 0)
    assert memory.log is not None
    assert len(memory.log) == 0
    one.num_computed = 20
    memory.commit_computed(one)
    assert len(memory.log) == 5


def test_a_drafter_that_does_not_pay_is_tried_again_for_a_small_share_of_the_time() -> None:
    leader = Leader(0.1, max_tokens=2000)
    asked = []
    for _ in range(600):
        run = leader.ask(0.1)
        asked.append(run)
        if run:
            plan = StepPlan(1, 1, 0, draft_runs=(run,))
            made = Drafted(leader.one.num_tokens + 1, (5,) * run.num_drafts)
            leader.planner.learn(plan, StepResult(1, {}, drafted={0: made}, draft_s=0.3))
        leader.go_on(leader.one.num_tokens + 1 if run else -1)
    trials = [run for run in asked if run]
    assert 2 <= len(trials) <= 0.01 * 600 / 0.3
    assert {run.num_drafts for run in trials} == {TRIAL_DRAFTS}


@pytest.mark.parametrize(("share", "chance"), [(0.02, 0.95), (0.3, 0.7), (0.3, 0.2), (2.0, 0.9), (None, 0.1)])
def test_steps_are_awaited_where_drafts_would_be_asked_for(share: float | None, chance: float) -> None:
    leader = Leader(share)
    assert leader.waits(chance) == (leader.ask(chance) is not None)


def test_a_trial_is_awaited_and_its_time_comes_while_steps_are_planned_ahead() -> None:
    leader, count = Leader(0.5, trials=FIRST_TRIALS - 1), 0
    assert leader.waits(0.1)
    assert leader.waits(0.1), "to ask for it does not begin it"
    assert leader.ask(0.1)
    while not leader.waits(0.1):
        count += 1
        assert count < 2000
    assert count > 50
    assert leader.ask(0.1)
    assert not leader.waits(0.1)


def test_a_trial_behind_a_long_prompt_goes_on_until_something_is_drafted() -> None:
    leader, asked = Leader(0.1, prompt=100, max_tokens=2000), list[DraftRun]()
    for _ in range(600):
        if run := leader.ask(0.1, budget=40):
            asked.append(run)
        leader.go_on(run.first + run.most if run else -1)
    assert any(run.num_drafts for run in asked)
    assert sum(run.most for run in asked) * 0.1 * STEADY[64] / 64 <= 0.01 * 600


def test_a_drafter_whose_timing_was_misled_is_found_out() -> None:
    leader = Leader(5.0, trials=0)
    counts = []
    for _ in range(8):
        run = leader.ask(0.9)
        counts.append(run.num_drafts if run else 0)
        if run:
            made = Drafted(leader.one.num_tokens + 1, (5,) * run.num_drafts)
            seconds = 0.05 * (1 + run.num_drafts)
            plan = StepPlan(1, 1, 0, draft_runs=(run,))
            leader.planner.learn(plan, StepResult(1, {}, drafted={0: made}, draft_s=seconds))
            leader.go_on(made.num_tokens)
    assert counts[0] == TRIAL_DRAFTS
    assert min(counts[1:]) > TRIAL_DRAFTS


def test_its_time_is_learnt() -> None:
    leader = Leader(0.1)
    run = leader.ask(0.9)
    assert run
    made = Drafted(leader.one.num_tokens + 1, (5,) * run.num_drafts)
    plan = StepPlan(1, 1, 0, draft_runs=(run,))
    leader.planner.learn(plan, StepResult(1, {}, drafted={0: made}, draft_s=20.0))
    leader.go_on(made.num_tokens)
    assert not leader.ask(0.9)


def test_runs_that_take_nothing_in_say_nothing_of_its_time() -> None:
    leader = Leader(0.1)
    run = leader.ask(0.9)
    assert run
    plan = StepPlan(1, 1, 0, draft_runs=(run,))
    leader.planner.learn(plan, StepResult(1, {}, drafted={0: Drafted(run.first)}, draft_s=1e-5))
    assert leader.ask(0.9) == run


@pytest.mark.parametrize("before", [(), (1,), (1, 2), (3,)])
def test_drafts_go_on_behind_those_of_others(before: tuple[int, ...]) -> None:
    drafts, one = RankDrafts(), request(1, [7, 8, 9])
    drafts.take(one, Drafted(3, (1, 2, 3, 4)), 0)
    found = [draft.token for draft in drafts.propose(one, before, 2)]
    assert found == ([] if before == (3,) else [1, 2, 3, 4][len(before) :][:2])
    one.output_token_ids.append(1)
    assert not drafts.propose(one, (), 2)
