"""Values cross from a thread to a loop in order, and none is lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from allspan.worker.service.mailbox import Mailbox


def never(value: object) -> bool:
    return False


@pytest.mark.parametrize("pause_s", [0.0, 0.001, 0.05])
def test_what_another_thread_posts_arrives_in_order(pause_s: float):
    async def main() -> list[int]:
        seen: list[int] = []
        done = asyncio.Event()

        def deliver(value: int) -> None:
            seen.append(value)
            if value == 9_999:
                done.set()

        box = Mailbox(deliver, never, pause_s)
        box.open()
        thread = threading.Thread(target=lambda: [box.post(value) for value in range(10_000)])
        thread.start()
        await asyncio.wait_for(done.wait(), 20)
        thread.join()
        box.close()
        box.post(10_000)
        return seen

    assert asyncio.run(main()) == list(range(10_000))


def test_what_was_posted_before_the_loop_listens_is_delivered_by_flush():
    async def main() -> list[str]:
        seen: list[str] = []
        box = Mailbox(seen.append, never, 10.0)
        box.post("early")
        box.open()
        box.flush()
        box.close()
        return seen

    assert asyncio.run(main()) == ["early"]


def test_after_a_delivery_what_can_wait_does_until_the_pause_ends_or_something_urgent_comes():
    async def main() -> list[list[str]]:
        seen: list[str] = []
        stages: list[list[str]] = []
        box = Mailbox(seen.append, str.isupper, 0.5)
        box.open()
        for posted, seconds in (("a", 0.1), ("b", 0.1), ("C", 0.1), ("d", 0.1), ("", 0.5), ("", 0.5), ("e", 0.1)):
            if posted:
                box.post(posted)
            await asyncio.sleep(seconds)
            stages.append(list(seen))
        box.close()
        return stages

    assert [len(stage) for stage in asyncio.run(main())] == [1, 1, 3, 3, 4, 4, 5]
