"""Which adapter gets which slot, who waits for one, and when an unloaded adapter's place is free."""

from __future__ import annotations

import random

import pytest

from allspan.protos.api.errors import AdapterNotFound, InternalError
from allspan.protos.api.options import RequestOptions
from allspan.worker.scheduler.adapter_table import MOST_PASSED_S, AdapterTable
from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.plan import Operation, StepPlan, StepResult
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.scheduler import Scheduler
from allspan.worker.step.row_inputs import RowInputs
from support.cores import request

LIMITS = Limits(
    vocab_size=97,
    max_model_len=64,
    page_size=16,
    num_pages=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_queued_requests=16,
    row_inputs=RowInputs(num_adapters=2),
)


class Clocked:
    """A scheduler with two slots, whose time the test sets."""

    def __init__(self, *adapters: int) -> None:
        self.now = 100.0
        self.scheduler = Scheduler(LIMITS, clock=lambda: self.now)
        self.table = self.scheduler.adapters
        for adapter in adapters:
            self.table.add(adapter)

    def submit(self, number: int, adapter: int, max_tokens: int = 4, priority: int = 0) -> Request:
        one = request(number, [1, 2, 3], max_tokens=max_tokens, ignore_eos=True)
        one.adapter, one.options = adapter, RequestOptions(priority=priority)
        self.scheduler.submit(one)
        return one

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.apply(StepResult(plan.step, {run.row: (5,) for run in plan.runs}))
        self.scheduler.check()
        return plan

    def joined(self) -> list[tuple[bytes, int]]:
        return [(join.request_id[:1], join.adapter) for join in self.step().joins]


def test_a_new_adapter_takes_the_least_recently_used_slot() -> None:
    world = Clocked(7, 8, 9)
    for number, adapter in enumerate((8, 7, 8)):
        world.submit(number, adapter, max_tokens=1)
        plan = world.step()
        assert ([join.adapter for join in plan.joins], plan.placements) == ([{7: 0, 8: 1}[adapter]], ())
    world.submit(5, 9, max_tokens=1)
    plan = world.step()
    assert ([join.adapter for join in plan.joins], plan.placements) == ([0], ((0, 9),))
    assert world.table.num_swaps == 1


def test_a_request_waits_for_a_slot_and_lets_others_pass() -> None:
    world = Clocked(7, 8, 9)
    ones = [world.submit(number, adapter) for number, adapter in enumerate((7, 8, 9, -1))]
    assert [join.adapter for join in world.step().joins] == [0, 1, -1]
    assert [one.row >= 0 for one in ones] == [True, True, False, True]
    while ones[0].row >= 0:
        assert not world.step().placements
    plan = world.step()
    assert ([join.adapter for join in plan.joins], plan.placements) == ([0], ((0, 9),))


def test_one_that_has_waited_long_is_passed_by_no_other_with_an_adapter() -> None:
    world = Clocked(7, 8, 9)
    long = [world.submit(number, adapter, max_tokens=20) for number, adapter in enumerate((7, 8))]
    starved = world.submit(2, 9)
    world.step()
    world.now += MOST_PASSED_S + 1
    world.step()
    late, plain = world.submit(3, 7), world.submit(4, -1)
    world.step()
    assert (late.row >= 0, plain.row >= 0) == (False, True)
    assert world.scheduler.cancel(long[0].request_id)
    world.step()
    assert (starved.row >= 0, late.row >= 0) == (True, False)
    assert world.scheduler.cancel(starved.request_id)
    world.step()
    assert late.row >= 0


def test_a_closed_adapter_takes_no_requests_and_is_unused_once_the_last_has_ended() -> None:
    world = Clocked(7, 8)
    one, waits = world.submit(1, 7), world.submit(2, 7)
    assert world.table.close(7) == 2
    with pytest.raises(AdapterNotFound, match="unloaded just now"):
        world.submit(3, 7)
    while one.row >= 0 or waits.row >= 0 or not one.output_token_ids:
        assert world.table.take_unused() == []
        world.step()
    assert (world.table.take_unused(), world.table.take_unused()) == ([7], [])
    world.table.remove(7)
    assert (world.table.add(9), len(world.table)) == (0, 2)


def test_an_adapter_that_is_still_loading_takes_no_requests_and_keeps_its_slot() -> None:
    world = Clocked(8)
    assert world.table.add(7, is_loading=True) == 1
    with pytest.raises(AdapterNotFound):
        world.submit(1, 7)
    world.table.add(9)
    world.submit(2, 9)
    assert world.step().placements == ((0, 9),)
    world.table.open(7)
    world.submit(3, 7)
    assert [join.adapter for join in world.step().joins] == [1]


def test_a_load_that_is_given_up_takes_no_request() -> None:
    world = Clocked()
    world.table.add(7, is_loading=True)
    assert world.table.close(7) == 0
    assert (world.table.take_if_unused(7), world.table.take_unused()) == (True, [])
    world.table.open(7)
    with pytest.raises(AdapterNotFound):
        world.submit(1, 7)
    world.table.remove(7)
    assert len(world.table) == 0


def test_a_request_that_ends_before_its_first_step_leaves_no_use_behind() -> None:
    world = Clocked(7)
    one = world.submit(1, 7)
    assert world.scheduler.cancel(one.request_id)
    world.step()
    assert world.table.close(7) == 0
    assert world.table.take_unused() == [7]


def test_removing_what_requests_still_have_is_a_bug() -> None:
    table = AdapterTable(1)
    table.add(7)
    one = request(1, [1])
    one.adapter = 7
    table.admit(one)
    with pytest.raises(InternalError, match="1 requests have it"):
        table.remove(7)


def test_an_operation_comes_with_its_argument() -> None:
    plan = Clocked().scheduler.schedule(Operation.DROP_ADAPTER, b"x")
    assert plan is not None
    assert (plan.operation, plan.argument) == (Operation.DROP_ADAPTER, b"x")


@pytest.mark.parametrize("seed", range(20))
def test_every_row_runs_with_its_own_adapter_and_every_request_ends(seed: int) -> None:
    draw, world, number = random.Random(seed), Clocked(1, 2, 3), 0
    ones: list[Request] = []
    slots = {0: 1, 1: 2}  # what the ranks hold; the third has none
    open_adapters, closed = [1, 2, 3], list[int]()
    running: dict[int, Request] = {}
    for _ in range(120):
        world.now += draw.choice((0.0, 0.5, 3.0))
        if draw.random() < 0.6 and len(world.scheduler.requests()) < 12:
            adapter = draw.choice([-1, *open_adapters])
            ones.append(world.submit(number, adapter, draw.randint(1, 6), draw.choice((0, 0, 1))))
            number += 1
        if draw.random() < 0.1 and world.scheduler.requests():
            world.scheduler.cancel(draw.choice(world.scheduler.requests()).request_id)
        if draw.random() < 0.1 and open_adapters:
            closed.append(open_adapters.pop(draw.randrange(len(open_adapters))))
            world.table.close(closed[-1])
        for adapter in world.table.take_unused():
            world.table.remove(adapter)
            closed.remove(adapter)
        if draw.random() < 0.1 and len(world.table) < 5:
            open_adapters.append(100 + number)
            number += 1
            if (slot := world.table.add(open_adapters[-1])) >= 0:
                slots[slot] = open_adapters[-1]
        _checked_step(world, ones, slots, running)
    for _ in range(200):
        world.now += 1.0
        _checked_step(world, ones, slots, running)
    assert not world.scheduler.requests()
    assert all(world.table.take_if_unused(adapter) for adapter in closed)


def _checked_step(world: Clocked, ones: list[Request], slots: dict[int, int], running: dict[int, Request]) -> None:
    """One step as the ranks see it: what leaves, what is placed, what joins, what runs."""
    plan = world.scheduler.schedule()
    if plan is None:
        return
    for row in plan.leaves:
        del running[row]
    in_use = {request.adapter for request in running.values()}
    for slot, adapter in plan.placements:
        assert slots.get(slot) not in in_use, "a running request's adapter has lost its slot"
        slots[slot] = adapter
    by_id = {one.request_id: one for one in ones}
    for join in plan.joins:
        one = running[join.row] = by_id[join.request_id]
        assert (slots[join.adapter] if join.adapter >= 0 else -1) == one.adapter
    world.scheduler.apply(StepResult(plan.step, {run.row: (5,) for run in plan.runs}))
    world.scheduler.check()
