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

        box = Mailbox(deliver, never, lambda: pause_s)
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
        box = Mailbox(seen.append, never, lambda: 10.0)
        box.post("early")
        box.open()
        box.flush()
        box.close()
        return seen

    assert asyncio.run(main()) == ["early"]


def test_after_a_release_only_urgent_outputs_are_delivered_before_the_pause_ends() -> None:
    async def main() -> list[tuple[int, int]]:
        seen: list[str] = []
        stages: list[tuple[int, int]] = []
        releases: list[int] = []

        def release() -> float:
            released = len(seen) > (releases[-1] if releases else 0)
            releases.append(len(seen))
            return 0.5 if released else 0.0

        box = Mailbox(seen.append, str.isupper, release)
        box.open()
        for posted, seconds in (("a", 0.1), ("b", 0.1), ("C", 0.1), ("d", 0.1), ("", 0.5), ("", 0.5), ("e", 0.1)):
            if posted:
                box.post(posted)
            await asyncio.sleep(seconds)
            stages.append((len(seen), releases[-1]))
        box.close()
        return stages

    assert asyncio.run(main()) == [(1, 1), (1, 1), (3, 1), (3, 1), (4, 4), (4, 4), (5, 5)]
