"""The loop that results arrive on: calls from other threads, and what comes after its end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from allspan.client.event_loop import HomeLoop, LoopThread
from allspan.protos.api.errors import Unavailable


async def three() -> int:
    return 3


def test_a_coroutine_runs_from_another_thread_and_from_another_loop() -> None:
    home = LoopThread("test")
    try:
        assert home.run(three()) == 3
        assert asyncio.run(home.arun(three())) == 3
    finally:
        home.close()


def test_what_comes_after_the_end_is_refused() -> None:
    home = LoopThread("test")
    home.close()
    with pytest.raises(Unavailable, match="the engine is closed"):
        home.run(three())


class ClosedMeanwhile(asyncio.SelectorEventLoop):
    """A loop whose owner closes it after a caller has seen it open."""

    def call_soon_threadsafe(self, *arguments: object, **options: object) -> asyncio.Handle:
        self.close()
        return super().call_soon_threadsafe(*arguments, **options)  # type: ignore[arg-type]


def test_a_loop_that_closes_between_check_and_call_refuses_alike() -> None:
    loop = ClosedMeanwhile()
    refused: list[BaseException] = []

    def call() -> None:
        try:
            HomeLoop(loop).run(three())
        except BaseException as error:
            refused.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(10)
    assert [type(error) for error in refused] == [Unavailable]
