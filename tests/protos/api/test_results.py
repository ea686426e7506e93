"""ResultQueue: nothing is lost, nothing comes twice, every wait ends."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from allspan.protos.api.errors import AllspanError, InternalError, Unavailable
from allspan.protos.api.results import Output, RequestState, RequestTimings, ResultQueue, TokenLogprob
from support.waiting import wait_until

SOON = 10.0


def tokens(*ids: int, end: str = "") -> Output:
    return Output(token_ids=ids, finish_reason=end)


class Reader(threading.Thread):
    """Reads a queue to its end."""

    def __init__(self, queue: ResultQueue) -> None:
        super().__init__(daemon=True)
        self.queue = queue
        self.ids: list[int] = []
        self.error: AllspanError | None = None

    def run(self) -> None:
        try:
            for output in self.queue:
                self.ids += output.token_ids
        except AllspanError as error:
            self.error = error


def test_outputs_since_the_last_read_come_merged() -> None:
    queue = ResultQueue()
    queue.put(Output((1,), (TokenLogprob(-0.5),)))
    queue.put(Output((2, 3), (TokenLogprob(-1.0), TokenLogprob(-1.5, ((3, -1.5),)))))
    queue.put(Output((), (), "stop", 3, RequestTimings(output_tokens=3)))
    output = queue.get(timeout=0)
    assert output is not None
    assert output.token_ids == (1, 2, 3)
    assert [entry.logprob for entry in output.logprobs] == [-0.5, -1.0, -1.5]
    assert (output.finish_reason, output.stop_token_id) == ("stop", 3)
    assert output.timings is not None
    assert output.timings.output_tokens == 3
    assert queue.num_tokens == 3


def test_a_read_waits_for_tokens() -> None:
    queue = ResultQueue()
    reader = Reader(queue)
    reader.start()
    queue.put(tokens(1))
    queue.put(tokens(2, end="length"))
    reader.join(SOON)
    assert not reader.is_alive()
    assert reader.ids == [1, 2]


def test_a_timeout_gives_none_and_not_before_it_ran_out() -> None:
    queue = ResultQueue()
    begin = time.monotonic()
    assert queue.get(timeout=0.05) is None
    assert time.monotonic() - begin >= 0.05
    assert queue.get_nowait() is None
    assert queue.state is RequestState.WAITING


def test_the_end_gives_none_for_ever() -> None:
    queue = ResultQueue()
    queue.put(tokens(1, end="stop"))
    assert queue.get() is not None
    assert queue.get() is None
    assert queue.get_nowait() is None
    assert queue.state is RequestState.FINISHED


def test_a_failure_comes_after_the_tokens_before_it_and_from_every_read() -> None:
    queue = ResultQueue()
    queue.put(tokens(1))
    queue.fail(Unavailable("rank 1 died"))
    output = queue.get()
    assert output is not None
    assert output.token_ids == (1,)
    for _ in range(3):
        with pytest.raises(Unavailable, match="rank 1 died"):
            queue.get()
    assert queue.state is RequestState.FAILED


def test_nothing_changes_after_the_end() -> None:
    queue = ResultQueue()
    queue.put(tokens(1, end="cancelled"))
    queue.put(tokens(2))
    queue.fail(InternalError("late"))
    assert queue.state is RequestState.CANCELLED
    assert [output.token_ids for output in queue] == [(1,)]
    assert queue.num_tokens == 1


def test_waiting_for_the_end_reads_nothing() -> None:
    queue = ResultQueue()
    assert not queue.wait_finished(timeout=0.01)
    threading.Thread(target=queue.put, args=(tokens(5, end="stop"),)).start()
    assert queue.wait_finished(timeout=SOON)
    assert queue.get_nowait() == tokens(5, end="stop")


def test_many_readers_share_the_tokens_and_all_see_the_end() -> None:
    queue = ResultQueue()
    readers = [Reader(queue) for _ in range(4)]
    for reader in readers:
        reader.start()
    for token in range(2000):
        queue.put(tokens(token))
    queue.put(tokens(2000, end="stop"))
    for reader in readers:
        reader.join(SOON)
    assert sorted(token for reader in readers for token in reader.ids) == list(range(2001))


def test_a_failure_reaches_every_reader() -> None:
    queue = ResultQueue()
    readers = [Reader(queue) for _ in range(3)]
    for reader in readers:
        reader.start()
    queue.fail(Unavailable("gone"))
    for reader in readers:
        reader.join(SOON)
    assert [str(reader.error) for reader in readers] == ["gone"] * 3


async def test_async_iteration_reads_to_the_end_while_a_thread_writes() -> None:
    queue = ResultQueue()

    def write() -> None:
        for token in range(500):
            queue.put(tokens(token))
        queue.put(tokens(end="stop"))

    thread = threading.Thread(target=write)
    thread.start()
    ids = [token async for output in queue for token in output.token_ids]
    thread.join(SOON)
    assert ids == list(range(500))


async def test_async_iteration_raises_the_failure_after_the_tokens() -> None:
    queue = ResultQueue()
    queue.put(tokens(1))
    queue.fail(Unavailable("gone"))
    outputs = aiter(queue)
    assert await anext(outputs) == tokens(1)
    with pytest.raises(Unavailable):
        await anext(outputs)


async def test_async_timeout_gives_none_and_leaves_no_waiter() -> None:
    queue = ResultQueue()
    assert await queue.aget(timeout=0.01) is None
    assert await queue.aget(timeout=0) is None
    assert queue._waiters == []


async def test_a_cancelled_wait_loses_no_tokens() -> None:
    queue = ResultQueue()
    read: list[int] = []
    for token in range(200):
        waiting = asyncio.create_task(queue.aget())
        await asyncio.sleep(0)
        queue.put(tokens(token))
        if token % 3 == 1:
            await asyncio.sleep(0)
        waiting.cancel()
        try:
            output = await waiting
        except asyncio.CancelledError:
            output = queue.get_nowait()
        if output is not None:
            read += output.token_ids
    assert read == list(range(200))
    assert queue._waiters == []


async def test_a_timeout_that_meets_a_token_loses_nothing() -> None:
    queue = ResultQueue()
    stop = threading.Event()

    def write() -> None:
        for token in range(300):
            queue.put(tokens(token))
            stop.wait(0.0005)
        queue.put(tokens(end="stop"))

    thread = threading.Thread(target=write)
    thread.start()
    ids: list[int] = []
    while not queue.state.is_final or queue._pending is not None:
        output = await queue.aget(timeout=0.0005)
        ids += output.token_ids if output is not None else ()
    thread.join(SOON)
    assert ids == list(range(300))


async def test_two_async_readers_both_come_to_an_end() -> None:
    queue = ResultQueue()

    async def read() -> list[int]:
        return [token async for output in queue for token in output.token_ids]

    readers = [asyncio.create_task(read()) for _ in range(2)]
    for token in range(50):
        queue.put(tokens(token))
        await asyncio.sleep(0)
    queue.put(tokens(end="stop"))
    first, second = await asyncio.wait_for(asyncio.gather(*readers), SOON)
    assert sorted(first + second) == list(range(50))


def test_a_waiter_of_a_closed_loop_does_not_break_the_writer() -> None:
    queue = ResultQueue()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(queue.aget())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    queue.put(tokens(1, end="stop"))
    assert queue.get() == tokens(1, end="stop")
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_blocked_reader_wakes_without_polling() -> None:
    queue = ResultQueue()
    reader = Reader(queue)
    reader.start()
    queue.put(tokens(1))
    wait_until(lambda: reader.ids == [1], what="the first token")
    queue.put(tokens(end="stop"))
    reader.join(SOON)
    assert not reader.is_alive()
