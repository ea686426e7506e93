"""Operations: done by every rank at the same step, told to whoever asked."""

from __future__ import annotations

import threading

import pytest

from allspan.protos.errors import AllspanError, CheckpointError, DeadlineExceeded, InvalidRequest, Unavailable
from allspan.worker.scheduler.plan import Operation
from support.cores import Collected, fake_core, request, step_until_idle
from support.threads import ThreadWorld
from support.waiting import wait_until


class Asking(threading.Thread):
    """A call of `operate`; `error` is what it raised."""

    def __init__(self, core, operation, timeout=10.0):
        super().__init__(daemon=True)
        self.error = None
        self._call = (core.operate, operation, timeout)
        self.start()

    def run(self):
        operate, *arguments = self._call
        try:
            operate(*arguments)
        except AllspanError as error:
            self.error = error

    def result(self):
        self.join(10)
        assert not self.is_alive()
        return self.error


def test_every_rank_does_it_at_the_same_step_between_the_tokens_of_others():
    world, collected = ThreadWorld(2), Collected()
    cores = [
        fake_core(64, collected, collectives=world.collectives[r], channel=world.channels[r], widths=(50, 47))[0]
        for r in range(2)
    ]
    told = [[], []]
    for rank, core in enumerate(cores):
        core.on_operation = lambda operation, rank=rank, core=core: told[rank].append((operation, core.steps))
    one = request(1, [1, 2, 3], max_tokens=40)
    for core in reversed(cores):
        core.submit(one if core is cores[0] else request(1, [1, 2, 3], max_tokens=40))
    ranks = threading.Thread(target=lambda: world.run(lambda rank: cores[rank].run()), daemon=True)
    ranks.start()
    cores[0].operate(Operation.START_PROFILE, 10.0)
    cores[0].operate(Operation.STOP_PROFILE, 10.0)
    wait_until(lambda: cores[0].statistics().finished_requests == 1, what="the request's end")
    cores[0].shutdown()
    ranks.join(10)
    assert told[0] == told[1]
    assert [operation for operation, _ in told[0]] == [Operation.START_PROFILE, Operation.STOP_PROFILE]
    assert len(collected.tokens(one)) == 40


def test_a_failure_is_told_to_the_caller_and_the_loop_goes_on():
    core, _ = fake_core()

    def fail(operation):
        raise CheckpointError("rank 1: model.safetensors: truncated")

    core.on_operation = fail
    core.stop_model(1.0)
    asking = Asking(core, Operation.LOAD_WEIGHTS)
    wait_until(lambda: core.is_busy, what="the operation")
    assert core.step()
    error = asking.result()
    assert isinstance(error, CheckpointError)
    assert not core.statistics().weights_loaded
    core.on_operation = lambda operation: None
    asking = Asking(core, Operation.LOAD_WEIGHTS)
    wait_until(lambda: core.is_busy, what="the operation")
    assert core.step()
    assert asking.result() is None
    core.start_model()
    core.submit(request(1, [1, 2, 3], max_tokens=3))
    step_until_idle(core)


def test_weights_are_not_touched_while_requests_are_let_in_or_run():
    core, _ = fake_core()
    with pytest.raises(Unavailable, match="stop_model"):
        core.operate(Operation.UNLOAD_WEIGHTS, 1.0)
    core.submit(request(1, [1, 2, 3], max_tokens=3))
    with pytest.raises(DeadlineExceeded):
        core.stop_model(0.01)
    with pytest.raises(Unavailable, match="stop_model"):
        core.operate(Operation.UNLOAD_WEIGHTS, 1.0)


def test_nobody_is_let_in_once_the_weights_are_about_to_go():
    core, _ = fake_core()
    core.stop_model(1.0)
    asking = Asking(core, Operation.UNLOAD_WEIGHTS)
    wait_until(lambda: core.is_busy, what="the operation")
    with pytest.raises(Unavailable, match="being unloaded"):
        core.start_model()
    assert core.step()
    assert asking.result() is None
    with pytest.raises(Unavailable, match="reload_weights"):
        core.start_model()


def test_an_operation_that_no_step_took_up_in_time_is_withdrawn():
    core, _ = fake_core()
    told = []
    core.on_operation = told.append
    with pytest.raises(DeadlineExceeded, match="start_profile"):
        core.operate(Operation.START_PROFILE, 0.01)
    assert not core.step()
    assert told == []


def test_what_was_cached_under_other_weights_is_void():
    outputs = Collected()
    core, _ = fake_core(collected=outputs)
    core.on_operation = lambda operation: None
    prompt = list(range(40))

    def cached(number):
        one = request(number, prompt, max_tokens=1)
        core.submit(one)
        step_until_idle(core)
        return outputs.outputs[one.request_id].timings.cached_tokens

    assert cached(1) == 0
    assert cached(2) > 0
    core.stop_model(1.0)
    asking = Asking(core, Operation.LOAD_WEIGHTS)
    wait_until(lambda: core.is_busy, what="the operation")
    step_until_idle(core)
    assert asking.result() is None
    assert core.statistics().weights_version == 2
    assert core.statistics().pages_cached == 0
    core.start_model()
    assert cached(3) == 0


def test_a_follower_is_not_the_one_to_ask():
    world = ThreadWorld(2)
    follower, _ = fake_core(64, collectives=world.collectives[1], channel=world.channels[1], widths=(50, 47))
    with pytest.raises(InvalidRequest, match="rank 0"):
        follower.operate(Operation.START_PROFILE, 1.0)
    with pytest.raises(InvalidRequest, match="rank 0"):
        follower.reset_prefix_cache()
