"""Drafts where steps run beside the host: steps are planned ahead while drafts would not pay, each draft is a row of
its own, and tokens are those of the plain loop."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.protos.api.options import RequestOptions
from allspan.protos.config.speculation import Speculation
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.engine.batch.inbox import Inbox
from allspan.worker.engine.core import EngineCore
from allspan.worker.scheduler.drafting.costs import StepCosts
from allspan.worker.scheduler.drafting.drafting import Drafting
from allspan.worker.scheduler.plan import StepPlan, StepResult
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.scheduler import Outcome
from support.cores import Collected, fake_gpu_core, request, step_until_idle
from support.drafters import Guesses, drafting
from support.fake_model import FakeGpuModel, greedy

VOCAB = 97
STEADY = {1: 1.0, 4: 1.1, 16: 1.6, 64: 4.2}
"""Seconds of steps by their tokens."""


class Knowing(Guesses):
    """Proposes what comes at the places `where` of an answer; with `errors`, that share of it wrong."""

    def __init__(self, where: range, errors: float = 0.0, likely: float = 0.5) -> None:
        self._where = where
        self._errors = errors
        self._likely = likely
        self._random = random.Random(3)

    def guess(self, request: Request, most: int) -> Sequence[int]:
        at = len(request.output_token_ids)
        if at not in self._where:
            return ()
        known = greedy(list(request.prompt_token_ids), request.max_tokens)[at : min(at + most, self._where.stop)]
        return [self._random.randrange(VOCAB) if self._random.random() < self._errors else token for token in known]

    def chance(self, kind: int) -> float:
        return self._likely


def drafting_core(
    drafter: Guesses, collected: Collected, num_pages: int = 200, costs: StepCosts | None = None, **sizes: int
) -> tuple[EngineCore, FakeGpuModel, list[StepPlan]]:
    """A core that drafts, and a list that grows with each plan that it runs."""
    core, model = fake_gpu_core(num_pages, collected, speculative_config="{}", **sizes)
    scheduler = core._planner.scheduler
    scheduler.drafting = drafting(drafter, 5, VOCAB)
    if costs is not None:  # a clock that stands still teaches nothing
        scheduler.drafting = Drafting(Speculation("toy", 5), (drafter,), VOCAB, costs, lambda: 0.0)
    plans: list[StepPlan] = []
    apply = core._batch.apply

    def noted(plan: StepPlan, inbox: Inbox, *rest: object) -> object:
        plans.append(plan)
        return apply(plan, inbox, *rest)  # type: ignore[arg-type]

    core._batch.apply = noted  # type: ignore[assignment, method-assign]
    return core, model, plans


def run(core: EngineCore, collected: Collected, ones: Sequence[Request]) -> None:
    for one in ones:
        core.submit(one)
    step_until_idle(core)
    for one in ones:
        assert collected.tokens(one) == greedy(list(one.prompt_token_ids), one.max_tokens)


def test_steps_are_planned_ahead_where_nothing_is_proposed_and_only_there() -> None:
    collected = Collected()
    core, model, plans = drafting_core(Knowing(range(8, 20)), collected)
    run(core, collected, [request(1, [3, 4, 5], max_tokens=30, ignore_eos=True)])
    drafted = [i for i, plan in enumerate(plans) if plan.drafts]
    assert [plan.in_flight for plan in plans[1 : drafted[0]]] == [1] * (drafted[0] - 1)
    assert [plan.in_flight for plan in plans[drafted[0] : drafted[-1] + 1]] == [0] * len(drafted)
    after = [plan.in_flight for plan in plans[drafted[-1] + 2 :] if plan.runs]
    assert after == [1] * len(after)
    assert len(after) >= 6
    assert model.num_forwards == 30 - core.statistics().accepted_tokens, "no step has run in vain"


def test_a_draft_is_a_row_of_a_step_of_decodes() -> None:
    collected = Collected()
    core, model, _ = drafting_core(Knowing(range(60)), collected)
    run(core, collected, [request(i, [3 + i, 4], max_tokens=11, ignore_eos=True) for i in range(2)])
    assert model.buckets == [0, 16, 16], "two prompts, then twice two tokens and a page of drafts behind each"


@pytest.mark.parametrize(("chunks", "bucket"), [((16, 64), 64), ((), 0)])
def test_drafts_run_beside_prompts(chunks: tuple[int, ...], bucket: int) -> None:
    collected = Collected()
    core, model, plans = drafting_core(Knowing(range(1, 60), 0.3), collected, max_num_batched_tokens=40)
    buffers = core._batch.buffers
    assert isinstance(buffers, DeviceBuffers)
    buffers.chunks = chunks
    first = request(0, [1, 2, 3], max_tokens=40, ignore_eos=True)
    core.submit(first)
    for _ in range(3):
        core.step()
    run(core, collected, [request(i, [7 + i] * 21, max_tokens=5, ignore_eos=True) for i in range(1, 4)])
    mixed = [i for i, plan in enumerate(plans) if plan.drafts and len(plan.drafts) < len(plan.runs)]
    assert mixed
    assert {model.buckets[i] for i in mixed} <= {16, bucket}
    assert collected.tokens(first) == greedy([1, 2, 3], 40)


def test_drafts_are_judged_while_steps_are_planned_ahead() -> None:
    collected = Collected()
    costs = StepCosts(STEADY, 64)
    core, _, plans = drafting_core(Knowing(range(1, 60), likely=0.02), collected, costs=costs)
    run(core, collected, [request(1, [3, 4, 5], max_tokens=50, ignore_eos=True)])
    first = next(i for i, plan in enumerate(plans) if plan.drafts)
    assert sum(plan.in_flight for plan in plans[:first]) >= 3, "at first they are unlikely"
    assert core.statistics().accepted_tokens > 20


def test_drafts_that_do_not_come_true_are_no_reason_to_wait() -> None:
    collected = Collected()
    core, _, plans = drafting_core(Knowing(range(60), 1.0, 0.6), collected, costs=StepCosts(STEADY, 64))
    run(core, collected, [request(i, [3, 4, i], max_tokens=60, ignore_eos=True) for i in range(3)])
    assert sum(plan.in_flight for plan in plans) > 0.6 * len(plans)


def test_a_step_of_requests_that_opt_out_is_timed_from_its_own_beginning() -> None:
    collected, costs = Collected(), StepCosts(STEADY, 64)
    core, _, plans = drafting_core(Knowing(range(0)), collected)
    now = itertools.count(1000)
    core._planner.scheduler.drafting = Drafting(
        Speculation("toy", 5), (Knowing(range(0)),), VOCAB, costs, lambda: float(next(now))
    )
    options = RequestOptions(speculation=False)
    run(core, collected, [replace(request(1, [3], max_tokens=2, ignore_eos=True), options=options)])
    assert [plan.in_flight for plan in plans if plan.runs] == [0, 1]
    assert costs.seconds(1, False) == pytest.approx(1.0, rel=0.2)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 30), st.integers(0, 12)),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([20, 40, 200]),
    st.sampled_from([(), (2, 8, 16)]),
    st.sampled_from([range(60), range(4, 9), range(12, 60)]),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_tokens_are_those_without_drafts_whoever_comes(
    days: list[tuple[list[int], int, int]], pages: int, chunks: tuple[int, ...], where: range, errors: float
) -> None:
    """Prompts, tokens and pauses; few pages, which preempt."""
    collected = Collected()
    core, _, _ = drafting_core(Knowing(where, errors), collected, pages)
    core._batch.buffers.chunks = chunks  # type: ignore[attr-defined]
    ones = []
    for number, (prompt, count, pause) in enumerate(days):
        ones.append(request(number, prompt, max_tokens=count, ignore_eos=True))
        core.submit(ones[-1])
        for _ in range(pause):
            core.step()
            core.check()
    step_until_idle(core)
    for one in ones:
        assert collected.tokens(one) == greedy(list(one.prompt_token_ids), one.max_tokens)


def test_callers_are_told_of_a_step_while_the_next_one_runs() -> None:
    told = list[int]()

    def tell(outcomes: list[Outcome]) -> None:
        told.append(model.num_forwards)
        collected(outcomes)

    collected = Collected()
    core, model, plans = drafting_core(Knowing(range(60)), collected)
    core.on_outputs = tell
    run(core, collected, [request(1, [3, 4, 5], max_tokens=20, ignore_eos=True)])
    assert sum(bool(plan.drafts) for plan in plans) > 3
    steps = model.num_forwards
    assert told == [*range(2, steps + 1), steps]


def test_a_request_that_is_cancelled_before_its_tokens_were_told_ends_behind_them() -> None:
    collected = Collected()
    core, _, _ = drafting_core(Knowing(range(60)), collected)
    planner, one = core._planner, request(1, [3, 4, 5], max_tokens=20, ignore_eos=True)
    finish = planner.finish

    def finishing(result: StepResult) -> None:
        finish(result)
        if len(result.tokens.get(0, ())) > 1:
            core.cancel([one.request_id])

    planner.finish = finishing  # type: ignore[method-assign]
    core.submit(one)
    step_until_idle(core)
    assert collected.reason(one) == "cancelled"
    assert collected.tokens(one) == greedy([3, 4, 5], 20)[:6], "the prompt's, four drafts and one more"
