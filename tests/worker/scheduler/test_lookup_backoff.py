"""How often drafts are looked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import create_autospec

import pytest

from allspan.protos.api.options import RequestOptions
from allspan.protos.config.speculation import Speculation
from allspan.worker.scheduler.counters import SchedulerCounters
from allspan.worker.scheduler.drafting.backoff import SKIP_AFTER
from allspan.worker.scheduler.drafting.costs import StepCosts
from allspan.worker.scheduler.drafting.drafting import Drafting
from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.lookahead import Flight
from allspan.worker.scheduler.page_manager import PageManager
from allspan.worker.scheduler.plan import Run, StepPlan, StepResult
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.step_builder import StepBuilder
from support.cores import request
from support.drafters import Guesses


class Asked(Guesses):
    """Takes `look_s` to say what it proposes, and keeps the lengths of what it was asked to go on from."""

    def __init__(self, look_s: float, drafts: Callable[[Request], Sequence[int]]) -> None:
        self.at: list[int] = []
        self.now = 0.0
        self._look_s = look_s
        self._drafts = drafts

    def guess(self, request: Request, most: int) -> Sequence[int]:
        self.at.append(request.num_tokens)
        self.now += self._look_s
        return self._drafts(request)

    def chance(self, kind: int) -> float:
        return 0.9


def stepping(drafter: Asked, costs: StepCosts) -> Callable[..., None]:
    """Runs a step of these requests, in each of which 2 is sampled: a second, and half a second for each draft."""
    drafting = Drafting(Speculation(), [drafter], 300, costs, lambda: drafter.now)
    memory, limits = create_autospec(PageManager, can_retract=True), Limits(300, 999, 16, 99, 4, 16, 9)
    memory.extend_for_drafts.side_effect = lambda request, count, running: (count, [])

    def step(*requests: Request) -> None:
        built = StepBuilder(limits)
        for row, each in enumerate(requests):
            each.num_unknown, each.max_tokens = 0, 900
            built.decode(each, Run(row, 1))
        drafting.fill(built, memory, requests)
        for each in requests:
            each.output_token_ids.append(2)
        flight = Flight(StepPlan(0, 0, 0, runs=tuple(built.runs), drafts=tuple(built.drafts.items())), requests, True)
        drafter.now += 1.0 + 0.5 * sum(map(len, built.drafts.values()))
        drafting.learn(flight, StepResult(0, dict.fromkeys(range(len(requests)), (2,))), SchedulerCounters())

    return step


@pytest.mark.parametrize(("look_s", "looks"), [(1e-3, 1.0), (12e-3, 1 / 3), (1.0, 1 / 8)])
def test_drafts_are_looked_for_less_often_where_there_are_none(look_s: float, looks: float) -> None:
    drafter = Asked(look_s, lambda request: [1] if len(request.prompt_token_ids) > 3 else [])
    step = stepping(drafter, StepCosts({1: 1.0, 16: 1.1}, 16))
    one = request(1, [1, 2, 3])
    for _ in range(500):
        step(one)
    assert drafter.at[:SKIP_AFTER] == list(range(3, 3 + SKIP_AFTER))
    assert len([at for at in drafter.at if at >= 300]) == pytest.approx(looks * 203, rel=0.02)
    drafter.at.clear()
    step(one, request(2, [1, 2, 3, 4]))  # another one may repeat itself
    assert drafter.at


def test_drafts_that_are_not_kept_are_looked_for_less_often() -> None:
    """They are run as long as they seem to pay."""
    drafter = Asked(0.05, lambda request: [1])
    step, one = stepping(drafter, StepCosts({1: 1.0, 2: 1.5, 16: 9.0}, 16)), request(1, [1, 2, 3])
    for _ in range(40):
        step(one)
    assert len(drafter.at) < 16


def test_nothing_is_looked_for_where_all_requests_have_opted_out() -> None:
    drafter = Asked(0.05, lambda request: [1])
    step = stepping(drafter, StepCosts({1: 1.0, 16: 1.1}, 16))
    out, other = request(1, [1, 2, 3]), request(2, [1, 2])
    out.options = RequestOptions(speculation=False)
    step(out)
    assert not drafter.at
    step(out, other)
    assert drafter.at == [2]
