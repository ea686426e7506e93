"""Work on bounded threads: what waits too long, or in too long a queue, is refused and never begun."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from allspan.client.gateway.offload import BoundedThreads
from allspan.protos.api.errors import InvalidRequest, QueueFull


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_work_that_waits_too_long_for_a_thread_is_refused_and_never_begun(go_on: threading.Event) -> None:
    threads, begun = BoundedThreads("texts", 1, 9, 0.05), []
    busy = asyncio.create_task(threads.run(lambda: go_on.wait(30)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=r"texts: the request has waited 0\.05 s for others"):
        await threads.run(lambda: begun.append(1))
    go_on.set()
    assert await busy, "what has begun is waited for"
    assert await threads.run(lambda: "later") == "later"
    assert not begun


async def test_more_work_than_may_wait_is_refused_at_once(go_on: threading.Event) -> None:
    threads = BoundedThreads("texts", 1, 1, 30.0)
    tasks = [asyncio.create_task(threads.run(lambda: go_on.wait(30))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="texts: 2 requests are being worked at, the limit"):
        await threads.run(lambda: None)
    go_on.set()
    assert await asyncio.gather(*tasks) == [True, True]


async def test_work_whose_caller_leaves_is_not_begun_and_frees_its_place(go_on: threading.Event) -> None:
    threads, begun = BoundedThreads("texts", 1, 1, 30.0), []
    busy = asyncio.create_task(threads.run(lambda: go_on.wait(30)))
    left = asyncio.create_task(threads.run(lambda: begun.append(1)))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    after = asyncio.create_task(threads.run(lambda: "after"))
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(busy, after) == [True, "after"]
    assert not begun


async def test_errors_are_the_works_own() -> None:
    def refuse() -> None:
        raise InvalidRequest("no", "messages")

    with pytest.raises(InvalidRequest, match="no"):
        await BoundedThreads("texts", 1, 1, 30.0).run(refuse)
