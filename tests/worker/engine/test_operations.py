"""Operations: what all ranks do at the same step, and what it leaves behind."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from allspan.protos.api.errors import CheckpointError, DeadlineExceeded, InvalidRequest, Unavailable
from allspan.protos.api.options import RequestOptions
from allspan.worker.scheduler.plan import Operation
from support.cores import Collected, fake_core, request, step_until_idle
from support.threads import ThreadWorld
from support.waiting import wait_until


@contextmanager
def running(*cores):
    threads = [threading.Thread(target=core.run, daemon=True) for core in cores]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        cores[0].shutdown()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def two_ranks():
    world = ThreadWorld(2)
    return [
        fake_core(64, collectives=world.collectives[rank], channel=world.channels[rank], widths=(50, 47))[0]
        for rank in range(2)
    ]


def test_every_rank_is_told_once_and_the_caller_waits_for_its_own():
    cores = two_ranks()
    told = [[], []]
    for core, seen in zip(cores, told, strict=True):
        core.operations.on_operation = lambda operation, argument, seen=seen: seen.append(operation)
    with running(*cores):
        cores[0].operate(Operation.START_PROFILE, 10)
        assert told[0] == [Operation.START_PROFILE]
        cores[0].operate(Operation.STOP_PROFILE, 10)
        wait_until(lambda: told[1] == [Operation.START_PROFILE, Operation.STOP_PROFILE], what="the follower's turn")
    assert told[0] == told[1]


def test_operations_come_between_the_steps_of_what_runs():
    collected = Collected()
    core, _ = fake_core(64, collected)
    one = request(1, [1, 2], max_tokens=40)
    with running(core):
        core.submit(one)
        core.operate(Operation.START_PROFILE, 10)
        wait_until(lambda: collected.reason(one), what="the end of the request")
    assert len(collected.tokens(one)) == 40


def test_what_an_operation_raised_is_told_to_its_caller_and_the_loop_goes_on():
    cores = two_ranks()

    def fails(operation, argument):
        raise CheckpointError("the file is gone")

    for core in cores:
        core.operations.on_operation = fails
        core.stop_model(1)
    with running(*cores):
        with pytest.raises(CheckpointError, match="the file is gone"):
            cores[0].operate(Operation.RELOAD_WEIGHTS, 10)
        assert not cores[0].operations.weights_loaded
        with pytest.raises(Unavailable, match="unloaded"):
            cores[0].start_model()
        for core in cores:
            core.operations.on_operation = lambda operation, argument: None
        cores[0].operate(Operation.RELOAD_WEIGHTS, 10)
        assert cores[0].operations.weights_loaded
        cores[0].start_model()


def test_weights_need_a_stopped_and_drained_model():
    core, _ = fake_core(64)
    with pytest.raises(Unavailable, match="stop_model"):
        core.operate(Operation.UNLOAD_WEIGHTS, 1)
    core.submit(request(1, [1]))
    with pytest.raises(DeadlineExceeded):
        core.stop_model(0.01)
    with pytest.raises(Unavailable, match="reload_weights needs a stopped model; call stop_model"):
        core.operate(Operation.RELOAD_WEIGHTS, 1)


def test_other_weights_void_what_the_cache_held():
    collected = Collected()
    core, _ = fake_core(64, collected)
    with running(core):
        for number in (1, 2):
            core.submit(request(number, [7] * 20, max_tokens=2))
            wait_until(lambda number=number: collected.reason(request(number, [1])), what="the end")
        assert core.statistics().prefix_hit_tokens == 16
        core.stop_model(10)
        core.operate(Operation.UNLOAD_WEIGHTS, 10)
        assert (core.statistics().pages_cached, core.statistics().weights_loaded) == (0, False)
        core.operate(Operation.RELOAD_WEIGHTS, 10)
        core.start_model()
        core.submit(request(3, [7] * 20, max_tokens=2))
        core.stop_model(10)
        counters = core.statistics()
    assert (counters.prefix_hit_tokens, counters.weights_version, counters.weights_loaded) == (16, 2, True)


def test_an_operation_that_does_not_come_to_its_turn_is_taken_back():
    core, _ = fake_core(64)
    told = []
    core.operations.on_operation = lambda operation, argument: told.append(operation)
    with pytest.raises(DeadlineExceeded, match="start_profile"):
        core.operate(Operation.START_PROFILE, 0.01)
    assert not core.step()
    assert told == []


def test_an_engine_that_ends_tells_who_waits():
    core, _ = fake_core(64)
    core.operations.on_operation = lambda operation, argument: core.shutdown()
    with running(core):
        core.operate(Operation.START_PROFILE, 10)
        with pytest.raises(Unavailable, match="shutting down"):
            core.operate(Operation.STOP_PROFILE, 10)


def test_a_follower_takes_no_operations():
    follower = two_ranks()[1]
    with pytest.raises(InvalidRequest, match="rank 0"):
        follower.operate(Operation.START_PROFILE, 1)
    with pytest.raises(InvalidRequest, match="rank 0"):
        follower.reset_prefix_cache()


def test_a_reset_empties_the_cache():
    core, _ = fake_core(64)
    core.submit(request(1, [7] * 20, max_tokens=2))
    step_until_idle(core)
    assert core.statistics().pages_cached == 5
    core.reset_prefix_cache()
    counters = core.statistics()
    assert (counters.pages_cached, counters.pages_used) == (0, 0)


def test_a_time_limit_ends_a_request_with_its_error_and_frees_its_id_later():
    collected = Collected()
    core, model = fake_core(64, collected)
    one = request(1, [1], max_tokens=60)
    one.options = RequestOptions(timeout_s=0.05)
    forward = model.forward
    slow = threading.Event()

    def paused(inputs):
        slow.wait(0.02)
        return forward(inputs)

    model.forward = paused
    with running(core):
        core.submit(one)
        wait_until(lambda: one.request_id in collected.errors, what="the deadline")
        assert isinstance(collected.errors[one.request_id], DeadlineExceeded)
        wait_until(lambda: core.statistics().running == 0, what="the row's end")
        counters = core.statistics()
    assert (counters.pages_used, counters.failed_requests, counters.finished_requests) == (0, 1, 1)
