"""CallQueue: a thread for calls that may wait long, so that they keep none of those that other calls wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from allspan.protos.api.errors import DeadlineExceeded, QueueFull

MOST_CALLS = 16
"""Calls of a queue, the one that runs among them."""

T = TypeVar("T")


class CallQueue:
    """Runs calls one after the other on a thread of its own; used on one asyncio loop."""

    def __init__(self, name: str) -> None:
        """`name`: what the calls do, in the plural, for messages."""
        self._name = name
        self._executor = ThreadPoolExecutor(1, name)
        self._calls: list[Future[Any]] = []

    async def run(self, call: Callable[[float], T], timeout: float) -> T:
        """Returns what `call` does with the seconds that are left of `timeout` when its turn comes. A call that is
        cancelled before that is never made. Raises QueueFull, and DeadlineExceeded where no time is left."""
        self._calls = [each for each in self._calls if not each.done()]
        if len(self._calls) >= MOST_CALLS:
            raise QueueFull(f"{len(self._calls)} {self._name} wait for each other, the limit: call again later")
        deadline = time.monotonic() + timeout

        def begin() -> T:
            left = deadline - time.monotonic()
            if left <= 0 < timeout:
                raise DeadlineExceeded(f"other {self._name} took the {timeout:g} s of this call: call again")
            return call(max(left, 0.0))

        future = self._executor.submit(begin)
        self._calls.append(future)
        return await asyncio.wrap_future(future)
