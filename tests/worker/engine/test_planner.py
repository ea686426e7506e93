"""LeaderPlanner: what it leaves in the inbox, when it reports ends, and what an operation waits for."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from allspan.protos.api.errors import AllspanError, DeadlineExceeded, InvalidRequest, Unavailable
from allspan.protos.api.results import Output
from allspan.worker.cache.spec import PageLifetime
from allspan.worker.engine.batch.inbox import Inbox
from allspan.worker.engine.operations import Operations
from allspan.worker.engine.status import EngineState, EngineStatus
from allspan.worker.engine.steps.planner import LeaderPlanner
from allspan.worker.scheduler.limits import GroupLimits, Limits
from allspan.worker.scheduler.plan import Operation, StepResult
from allspan.worker.scheduler.scheduler import Outcome, Scheduler
from support.cores import request

LIMITS = Limits(97, 64, 4, 16, 4, 16, 8)


class Leader:
    """A planner with all that it works on."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.ends: list[Outcome] = []
        self.status, changed = EngineStatus(0), threading.Condition()
        self.inbox = Inbox(8)
        self.operations = Operations(changed, self.status)
        scheduler = Scheduler(limits)
        self.planner = LeaderPlanner(scheduler, self.inbox, self.operations, self.status, changed, self.ends.extend)

    def submit(self, number: int, prompt: list[int]) -> bytes:
        one = request(number, prompt, max_tokens=4)
        self.inbox.put(one)
        self.planner.submit(one)
        return one.request_id


def test_a_request_that_is_refused_leaves_the_inbox() -> None:
    leader = Leader()
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        leader.submit(1, [1000])
    assert len(leader.inbox) == 0
    assert leader.planner.is_drained()


def test_a_cancelled_request_ends_with_the_next_plan_and_keeps_its_id_for_a_while() -> None:
    leader = Leader()
    one = leader.submit(1, [1, 2])
    leader.planner.cancel([one])
    assert leader.ends == []
    leader.planner.plan()
    assert [(ended.request_id, end.finish_reason) for ended, end in leader.ends if isinstance(end, Output)] == [
        (one, "cancelled")
    ]
    with pytest.raises(AllspanError, match="cancelled just now"):
        leader.inbox.put(request(1, [3]))


def test_an_operation_is_done_when_its_step_is_finished() -> None:
    leader = Leader()
    pending = leader.operations.add(Operation.START_PROFILE)
    plan = leader.planner.plan()
    assert plan is not None
    assert (plan.operation, pending.is_planned, pending.is_done) == (Operation.START_PROFILE, True, False)
    leader.operations.carry_out(plan, leader.planner.invalidate)
    leader.planner.finish(StepResult(plan.step, {}))
    assert pending.is_done
    assert not leader.planner.has_work


def test_a_shutdown_goes_before_operations_that_wait() -> None:
    leader = Leader()
    leader.operations.add(Operation.START_PROFILE)
    leader.status.close()
    plan = leader.planner.plan()
    assert plan is not None
    assert plan.operation is Operation.SHUTDOWN


def test_draining_ends_with_the_last_request_or_the_loop() -> None:
    leader = Leader()
    leader.submit(1, [1, 2])
    with pytest.raises(DeadlineExceeded, match=r"1 requests still run after 0\.01 s"):
        leader.planner.drain(0.01)
    leader.status.move(EngineState.FAILED, "the engine has failed: a peer is gone")
    leader.planner.drain(0.01)
    leader.planner.end()
    assert [(type(end), str(end)) for _, end in leader.ends] == [(Unavailable, "the engine has failed: a peer is gone")]


def test_one_cache_group_is_the_fullest_and_the_scarcest() -> None:
    leader = Leader()
    leader.submit(1, [1] * 9)
    leader.planner.plan()
    told = leader.planner.statistics()
    assert (told["fullest_pages_used"], told["fullest_pages_total"]) == (told["pages_used"], told["pages_total"])
    assert told["pages_used"] > 0
    assert told["free_tokens"] == (told["pages_total"] - told["pages_used"]) * 4
    assert told["filling_tokens"] == told["pages_total"] * 4


def test_usage_is_of_the_fullest_group_and_free_tokens_of_the_scarcest() -> None:
    leader = Leader(replace(LIMITS, num_pages=160, more_groups=(GroupLimits(20, PageLifetime(is_state=True)),)))
    leader.submit(1, [1] * 9)
    leader.planner.plan()
    told = leader.planner.statistics()
    assert told["pages_total"] == 180
    assert (told["fullest_pages_used"], told["fullest_pages_total"]) == (1, 20), "a state each; 3 of 160 pages are less"
    assert told["free_tokens"] == (160 - 3) * 4, "the states would do for 19 full contexts"
    assert told["filling_tokens"] == 20 * 64
