"""The loop of `generate`: order, bound, back-off, stop strings and failures, on an engine of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from allspan.protos.api import batch_generate
from allspan.protos.api.batch_generate import AsyncWaits, BatchGenerate, Started, Work, run_blocking
from allspan.protos.api.errors import AllspanError, InternalError, InvalidRequest, QueueFull, Unavailable
from allspan.protos.api.results import Output, RequestHandle, ResultQueue
from allspan.protos.api.sampling import SamplingParams
from support.byte_tokenizer import byte_tokenizer

ONE = SamplingParams(max_tokens=1, seed=1)


class FakeCalls:
    """Takes `capacity` requests that have not ended, and answers a request with its prompt when it is finished."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.capacity = capacity
        self.running: dict[str, tuple[ResultQueue, Work]] = {}
        self.most_running = 0
        self.starts: list[int] = []
        self.released: set[str] = set()
        self.outlasted: list[Unavailable] = []
        self.refusal: AllspanError | None = None

    async def start(self, work: Sequence[Work]) -> list[Started | AllspanError]:
        self.starts.append(len(work))
        return [self._start(each) for each in work]

    def _start(self, work: Work) -> Started | AllspanError:
        if self.refusal is not None:
            return self.refusal
        if len(self.running) >= self.capacity:
            return QueueFull(f"{self.capacity} requests wait")
        handle, queue = RequestHandle(f"{len(self.starts)}-{len(self.running)}-{work[0][0]}"), ResultQueue()
        self.running[handle.request_id] = (queue, work)
        self.most_running = max(self.most_running, len(self.running))
        return handle, queue

    def finish(self, count: int = 1) -> None:
        """Ends the requests that were started last."""
        for name in list(self.running)[-count:]:
            queue, (prompt, _) = self.running.pop(name)
            queue.put(Output(tuple(prompt), finish_reason="length"))

    async def outlast(self, error: Unavailable) -> None:
        self.outlasted.append(error)
        if error.message == "for good":
            raise error
        self.refusal = None

    def release(self, handle: RequestHandle) -> None:
        self.released.add(handle.request_id)
        if (entry := self.running.pop(handle.request_id, None)) is not None:
            entry[0].put(Output(finish_reason="cancelled"))


class Steps:
    """Waits that let the engine of the test work instead of time passing."""

    def __init__(self, calls: FakeCalls, finishes: int = 1) -> None:
        self._calls = calls
        self._finishes = finishes
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._calls.finish(self._finishes)

    async def read(self, queue: ResultQueue, seconds: float) -> Output | None:
        self._calls.finish(self._finishes)
        return queue.get_nowait()


def run(calls: FakeCalls, waits: Steps, prompts: Sequence[int], params: SamplingParams = ONE) -> list[Any]:
    generation = BatchGenerate(calls, waits, byte_tokenizer())
    return run_blocking(generation.run([((number,), params) for number in prompts]))


def test_completions_come_in_the_order_of_the_prompts() -> None:
    calls = FakeCalls()
    found = run(calls, Steps(calls), range(65, 90))
    assert [one.token_ids for one in found] == [(number,) for number in range(65, 90)]
    assert [one.text for one in found] == [chr(number) for number in range(65, 90)]


def test_a_queue_that_is_full_gets_fewer_requests_at_once_and_later() -> None:
    calls = FakeCalls(capacity=3)
    waits = Steps(calls)
    found = run(calls, waits, range(40))
    assert [one.token_ids for one in found] == [(number,) for number in range(40)]
    assert calls.starts[:2] == [32, 1]
    assert waits.pauses[0] == batch_generate.FIRST_PAUSE_S
    assert calls.most_running == 3


def test_a_call_has_no_more_than_so_many_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_generate, "MAX_IN_FLIGHT", 5)
    calls = FakeCalls()
    assert len(run(calls, Steps(calls), range(20))) == 20
    assert calls.most_running == 5


def test_a_queue_that_stays_full_fails_the_call_and_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_generate, "QUEUE_WAIT_S", 0.0)
    calls = FakeCalls(capacity=2)
    with pytest.raises(QueueFull, match="2 requests wait"):
        run(calls, Steps(calls, finishes=0), range(4))
    assert len(calls.released) == 2
    assert not calls.running


def test_a_start_that_may_succeed_later_is_waited_for_and_another_is_not() -> None:
    calls = FakeCalls()
    calls.refusal = Unavailable("rank 1 was killed")
    assert len(run(calls, Steps(calls), range(3))) == 3
    assert {error.message for error in calls.outlasted} == {"rank 1 was killed"}
    calls.refusal = Unavailable("for good")
    with pytest.raises(Unavailable, match="for good"):
        run(calls, Steps(calls), range(3))
    calls.refusal = InvalidRequest("max_tokens is 9")
    with pytest.raises(InvalidRequest, match="max_tokens is 9"):
        run(calls, Steps(calls), range(3))


class Script:
    """Waits during which something happens once to the requests that run, and nothing else."""

    def __init__(self, calls: FakeCalls) -> None:
        self._calls = calls
        self.released_at: list[set[str]] = []

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing is refused here")

    async def read(self, queue: ResultQueue, seconds: float) -> Output | None:
        self.released_at.append(set(self._calls.released))
        if len(self.released_at) == 1:
            names = list(self._calls.running)
            self._calls.running[names[1]][0].put(Output(tuple(b"ab!c")))
        elif len(self.released_at) == 3:
            self._calls.finish(3)
        return queue.get_nowait()


def test_a_stop_string_ends_its_request_before_its_turn() -> None:
    calls = FakeCalls()
    waits = Script(calls)
    params = SamplingParams(max_tokens=9, seed=1, stop=("!",))
    work: list[Work] = [((number,), params) for number in (65, 66, 67)]
    found = run_blocking(BatchGenerate(calls, waits, byte_tokenizer()).run(work))
    assert waits.released_at[0] == set()
    assert len(waits.released_at[1]) == 1
    assert [(one.text, one.finish_reason) for one in found] == [("A", "length"), ("ab", "stop"), ("C", "length")]


async def test_a_failure_ends_the_call_before_its_turn() -> None:
    calls = FakeCalls()
    call = asyncio.create_task(BatchGenerate(calls, AsyncWaits(), None).run([((1,), ONE), ((2,), ONE)]))
    while len(calls.running) < 2:
        await asyncio.sleep(0)
    list(calls.running.values())[1][0].fail(InternalError("a bug"))
    with pytest.raises(InternalError, match="a bug"):
        await asyncio.wait_for(call, 5)
    assert len(calls.released) == 2


def test_a_coroutine_that_waits_on_a_loop_cannot_block() -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    coroutine: Coroutine[Any, Any, None] = waits()
    with pytest.raises(RuntimeError, match="waits on an asyncio loop"):
        run_blocking(coroutine)
