"""Work that the event loop does itself while it is short, and hands to a thread when it is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from allspan.protos.api.errors import QueueFull

INLINE_CHARS = 8192
"""Shorter texts are tokenised on the event loop: a thread's hand-over costs more than they do."""

P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the function's result, run on a thread if it is large. `size` is the number of characters, or of units
    that take as long."""
    if size <= INLINE_CHARS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


class BoundedThreads:
    """Threads for one kind of work; what finds them all busy waits for a bounded time, among a bounded number."""

    def __init__(self, work: str, count: int, most_waiting: int, wait_s: float) -> None:
        """`work`: what they do, for messages: "chat templates"."""
        self._work = work
        self._wait_s = wait_s
        self._most = count + most_waiting
        self._executor = ThreadPoolExecutor(count, work)
        self._jobs: set[Future[Any]] = set()

    async def run(self, function: Callable[[], T]) -> T:
        """Returns the function's result. Raises QueueFull; then, and when the caller is cancelled before it has begun,
        the function is not called."""
        if len(self._jobs) >= self._most:
            raise QueueFull(f"{self._work}: {self._most} requests are being worked at, the limit; try again later")
        job = self._executor.submit(function)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        result = asyncio.wrap_future(job)
        try:
            await asyncio.wait([result], timeout=self._wait_s)
            if job.cancel():  # still waiting for a thread
                raise QueueFull(f"{self._work}: the request has waited {self._wait_s:g} s for others; try again later")
            return await result
        finally:
            result.cancel()
