"""Values cross from a thread to a loop in order, and none is lost."""

from __future__ import annotations

import asyncio
import threading

from allspan.worker.service.mailbox import Mailbox


def test_what_another_thread_posts_arrives_in_order():
    async def main() -> list[int]:
        seen: list[int] = []
        done = asyncio.Event()

        def deliver(value: int) -> None:
            seen.append(value)
            if value == 9_999:
                done.set()

        box = Mailbox(deliver)
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
        box = Mailbox(seen.append)
        box.post("early")
        box.open()
        box.flush()
        box.close()
        return seen

    assert asyncio.run(main()) == ["early"]
