"""The scheduler against a fake clock and a stand-in for the model that counts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.protos.api.errors import AllspanError, AlreadyExists, InternalError, InvalidRequest, QueueFull, Unavailable
from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.plan import Operation, StepPlan, StepResult
from allspan.worker.scheduler.request import Request, RequestStatus
from allspan.worker.scheduler.scheduler import Scheduler
from support.cores import request

EOS = 99
LIMITS = Limits(
    vocab_size=100,
    max_model_len=64,
    page_size=4,
    num_pages=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_queued_requests=100,
)


class World:
    """A scheduler, and rows as a rank mirrors them. The n-th output token of a request is n, or what `script` says."""

    def __init__(self, script: dict[int, dict[int, int]] | None = None, **limits: int) -> None:
        self.scheduler = Scheduler(dataclasses.replace(LIMITS, **limits), (EOS,), clock=self._tick)
        self.now = 0.0
        self.rows: dict[int, Request] = {}
        self.known: dict[bytes, Request] = {}
        self.tokens: dict[bytes, list[int]] = {}
        self.ends: dict[bytes, object] = {}
        self.dropped: set[bytes] = set()
        self.plans: list[StepPlan] = []
        self._script = script or {}

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def submit(self, one: Request) -> Request:
        self.scheduler.submit(one)
        self.known[one.request_id] = one
        self.tokens[one.request_id] = []
        return one

    def cancel(self, one: Request) -> None:
        outcome = self.scheduler.cancel(one.request_id)
        if outcome is not None:
            self._take([outcome])

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.plans.append(plan)
        assert plan.step == len(self.plans)
        for row in plan.leaves:
            del self.rows[row]
        for request_id in plan.drops:
            assert request_id not in self.dropped
            self.dropped.add(request_id)
        for join in plan.joins:
            assert join.row not in self.rows
            self.rows[join.row] = self.known[join.request_id]
            assert join.num_output == len(self.tokens[join.request_id])
        assert plan.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        tokens = {}
        for run in plan.runs:
            one = self.rows[run.row]
            pending = one.num_tokens - one.num_computed
            assert 1 <= run.num_tokens <= pending
            assert len(one.held[0].pages) * 4 >= one.num_computed + run.num_tokens
            if run.num_tokens == pending:
                nth = len(self.tokens[one.request_id])
                number = int.from_bytes(one.request_id, "little")
                tokens[run.row] = (self._script.get(number, {}).get(nth, nth),)
        self._take(self.scheduler.apply(StepResult(plan.step, tokens, tokens_hash=plan.step)))
        self.scheduler.check()
        return plan

    def run(self, most: int = 100_000) -> int:
        for count in range(most):
            if self.step() is None:
                return count
        raise AssertionError("no end")

    def _take(self, outcomes: list[tuple[Request, object]]) -> None:
        for one, outcome in outcomes:
            assert one.request_id not in self.ends, "a request ends once and says nothing after"
            if isinstance(outcome, AllspanError):
                self.ends[one.request_id] = outcome
                continue
            self.tokens[one.request_id] += outcome.token_ids
            if outcome.finish_reason:
                self.ends[one.request_id] = outcome.finish_reason
                assert outcome.timings.output_tokens == len(self.tokens[one.request_id])


def test_decodes_come_before_prefill_chunks_within_one_budget():
    world = World(max_num_batched_tokens=8)
    first = world.submit(request(1, [1] * 3, max_tokens=10))
    world.step()
    world.submit(request(2, [1] * 20, max_tokens=2))
    chunks = []
    while plan := world.step():
        counts = {world.known[key].request_id: 0 for key in world.known}
        for run in plan.runs:
            counts[world.rows[run.row].request_id] = run.num_tokens
        chunks.append(tuple(counts.values()))
        if plan.runs and first.request_id not in world.ends:
            assert plan.runs[0].row == first.row
    assert chunks[:4] == [(1, 7), (1, 7), (1, 6), (1, 1)]


def test_prompts_are_taken_in_order_of_arrival():
    world = World(max_num_batched_tokens=8, max_num_seqs=2)
    for number in range(5):
        world.submit(request(number, [1] * 6, max_tokens=3))
    world.run()
    joined = [join.request_id[0] for plan in world.plans for join in plan.joins]
    assert joined == [0, 1, 2, 3, 4]


def test_no_more_rows_than_allowed_run_at_once():
    world = World(max_num_seqs=3)
    for number in range(10):
        world.submit(request(number, [1], max_tokens=4))
    world.run()
    assert max(len(plan.runs) for plan in world.plans) == 3
    assert len(world.ends) == 10


def test_the_end_of_sequence_ends_a_request_and_is_its_last_token():
    world = World(script={1: {2: EOS}})
    one = world.submit(request(1, [1], max_tokens=10))
    world.run()
    assert world.tokens[one.request_id] == [0, 1, EOS]
    assert world.ends[one.request_id] == "stop"


def test_ignore_eos_goes_on_to_max_tokens():
    world = World(script={1: {2: EOS}})
    one = world.submit(request(1, [1], max_tokens=5, ignore_eos=True))
    world.run()
    assert world.tokens[one.request_id] == [0, 1, EOS, 3, 4]
    assert world.ends[one.request_id] == "length"


def test_a_stop_token_id_ends_a_request_even_when_eos_is_ignored():
    world = World()
    one = world.submit(request(1, [1], max_tokens=10, ignore_eos=True, stop_token_ids=(3,)))
    world.run()
    assert world.tokens[one.request_id] == [0, 1, 2, 3]
    assert world.ends[one.request_id] == "stop"


def test_a_stop_token_on_the_last_place_counts_as_stop():
    world = World(script={1: {4: EOS}})
    one = world.submit(request(1, [1], max_tokens=5))
    world.run()
    assert world.ends[one.request_id] == "stop"


def test_the_context_ends_a_request_with_length():
    world = World()
    one = world.submit(request(1, [1] * 60, max_tokens=100))
    world.run()
    assert len(world.tokens[one.request_id]) == 4
    assert world.ends[one.request_id] == "length"


def test_a_full_queue_refuses_one_more_and_names_the_limit():
    world = World(max_queued_requests=2)
    world.submit(request(1, [1]))
    world.submit(request(2, [1]))
    with pytest.raises(QueueFull, match="max_queued_requests is 2"):
        world.submit(request(3, [1]))
    world.step()
    world.submit(request(4, [1]))
    world.run()
    assert len(world.ends) == 3


def test_an_id_in_use_is_refused():
    world = World()
    world.submit(request(1, [1]))
    with pytest.raises(AlreadyExists):
        world.submit(request(1, [2]))


def test_an_id_can_be_used_again_after_the_end():
    world = World()
    world.submit(request(1, [1], max_tokens=1))
    world.run()
    again = request(1, [1], max_tokens=1)
    world.scheduler.submit(again)
    assert again.status is RequestStatus.WAITING


def test_a_refused_request_leaves_nothing_behind():
    world = World()
    with pytest.raises(InvalidRequest):
        world.scheduler.submit(request(1, []))
    assert not world.scheduler.has_work
    assert world.scheduler.schedule() is None


def test_the_youngest_makes_room_and_loses_no_token():
    world = World(num_pages=8, max_num_seqs=4)
    requests = [world.submit(request(number, [1] * 4, max_tokens=12)) for number in range(4)]
    world.run()
    assert world.scheduler.counters.preemptions > 0
    for one in requests:
        assert world.tokens[one.request_id] == list(range(12))
    rejoined = [join.request_id[0] for plan in world.plans for join in plan.joins if join.num_output]
    assert rejoined
    assert 0 not in rejoined, "the oldest is never put out"


def test_a_cancelled_request_frees_its_pages_at_once_and_its_row_with_the_next_plan():
    world = World()
    one = world.submit(request(1, [1] * 9, max_tokens=30))
    world.step()
    assert world.scheduler.memory.cache.device.num_used == 3
    world.cancel(one)
    assert world.scheduler.memory.cache.device.num_used == 0
    plan = world.step()
    assert plan is not None
    assert (plan.leaves, plan.drops, plan.runs) == ((0,), (one.request_id,), ())
    assert world.step() is None
    assert world.ends[one.request_id] == "cancelled"


def test_a_cancel_between_schedule_and_apply_drops_the_token_in_flight():
    scheduler = Scheduler(LIMITS)
    one = request(1, [1, 2])
    scheduler.submit(one)
    plan = scheduler.schedule()
    assert scheduler.cancel(one.request_id) is not None
    assert scheduler.apply(StepResult(plan.step, {0: (5,)})) == []
    scheduler.check()
    assert scheduler.schedule().leaves == (0,)


def test_a_waiting_request_that_is_cancelled_is_dropped_without_a_row():
    world = World(max_num_seqs=1)
    world.submit(request(1, [1], max_tokens=3))
    waiting = world.submit(request(2, [1], max_tokens=3))
    world.step()
    world.cancel(waiting)
    plan = world.step()
    assert plan.drops == (waiting.request_id,)
    assert plan.leaves == ()


def test_cancelling_an_unknown_request_does_nothing():
    assert Scheduler(LIMITS).cancel(bytes(16)) is None


def test_logits_that_are_not_finite_fail_that_request_alone():
    world = World(script={1: {2: -1}})
    bad = world.submit(request(1, [1], max_tokens=5))
    good = world.submit(request(2, [1], max_tokens=5))
    world.run()
    assert isinstance(world.ends[bad.request_id], InternalError)
    assert world.ends[good.request_id] == "length"


def test_abandon_ends_everything_with_the_error():
    world = World(max_num_seqs=1)
    for number in range(3):
        world.submit(request(number, [1]))
    world.step()
    error = Unavailable("gone")
    outcomes = world.scheduler.abandon(error)
    assert [outcome for _, outcome in outcomes] == [error] * 3
    world.scheduler.check()
    assert world.scheduler.memory.cache.device.num_used == 0


def test_schedule_and_apply_alternate():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(request(1, [1]))
    plan = scheduler.schedule()
    with pytest.raises(InternalError, match="in flight"):
        scheduler.schedule()
    with pytest.raises(InternalError, match="in flight"):
        scheduler.apply(StepResult(plan.step + 1, {}))


def test_an_operation_runs_no_tokens():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(request(1, [1]))
    plan = scheduler.schedule(Operation.SHUTDOWN)
    assert plan.operation is Operation.SHUTDOWN
    assert plan.runs == ()


def test_timings_run_from_arrival_to_start_to_first_token_to_end():
    scheduler = Scheduler(LIMITS, clock=iter([10.0, 11.0, 13.0]).__next__)
    one = request(1, [1, 2, 3], max_tokens=1)
    scheduler.submit(one)
    plan = scheduler.schedule()
    ((_, output),) = scheduler.apply(StepResult(plan.step, {0: (5,)}))
    timings = output.timings
    assert (timings.queue_s, timings.ttft_s, timings.total_s) == (1.0, 3.0, 3.0)
    assert (timings.prompt_tokens, timings.output_tokens) == (3, 1)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 24), st.integers(1, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(actions, st.integers(11, 40), st.integers(1, 5), st.integers(0, 20))
def test_whatever_comes_each_request_ends_once_with_all_its_tokens(actions, num_pages, rows, extra_budget):
    world = World(num_pages=num_pages, max_num_seqs=rows, max_num_batched_tokens=rows + extra_budget)
    submitted: list[Request] = []
    cancelled: set[bytes] = set()
    for kind, first, second in actions:
        if kind == "submit":
            submitted.append(world.submit(request(len(submitted), [1] * first, max_tokens=second)))
        elif kind == "cancel" and first < len(submitted):
            cancelled.add(submitted[first].request_id)
            world.cancel(submitted[first])
            world.scheduler.check()
        elif kind == "step":
            for _ in range(first):
                world.step()
    world.run(most=20_000)
    assert world.scheduler.memory.cache.device.num_used == 0
    assert not world.rows
    assert world.dropped == {one.request_id for one in submitted}
    for one in submitted:
        tokens = world.tokens[one.request_id]
        assert tokens == list(range(len(tokens)))
        if one.request_id not in cancelled:
            assert (world.ends[one.request_id], len(tokens)) == ("length", one.max_tokens)
        else:
            assert world.ends[one.request_id] in ("length", "cancelled")
