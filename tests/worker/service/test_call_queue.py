"""Calls that wait for each other: each has its time, only so many wait, and one that is given up is never made."""

from __future__ import annotations

import asyncio
import threading

import pytest

from allspan.protos.api.errors import DeadlineExceeded, QueueFull
from allspan.worker.service.call_queue import MOST_CALLS, CallQueue


async def test_calls_run_in_turn_within_their_time_and_up_to_a_limit() -> None:
    queue, may_end = CallQueue("loads"), threading.Event()
    made: list[int] = []

    def call(number: int, timeout: float = 60.0) -> asyncio.Task[None]:
        def work(left: float) -> None:
            assert may_end.wait(10)
            assert 0 < left <= timeout
            made.append(number)

        return asyncio.ensure_future(queue.run(work, timeout))

    calls = [call(0), call(1, 0.01), *(call(number) for number in range(2, MOST_CALLS))]
    await asyncio.sleep(0.02)
    with pytest.raises(QueueFull, match="16 loads wait for each other, the limit: call again later"):
        await call(MOST_CALLS)
    calls[3].cancel()
    await asyncio.sleep(0.01)
    may_end.set()
    with pytest.raises(DeadlineExceeded, match=r"other loads took the 0\.01 s of this call: call again"):
        await calls[1]
    await calls[-1]
    assert made == [0, 2, *range(4, MOST_CALLS)]
    await call(MOST_CALLS)
    assert made[-1] == MOST_CALLS
