"""An asyncio loop in a daemon thread, for synchronous callers on any thread and for callers on other loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from allspan.protos.errors import Unavailable

T = TypeVar("T")


class LoopThread:
    """Runs coroutines; refuses with Unavailable once closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the loop's own thread, which must not wait for it."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it to its end from another thread; an exception here (Ctrl-C) cancels it."""
        future = self._submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """`run` from another asyncio loop; cancelling it cancels the coroutine."""
        return await asyncio.wrap_future(self._submit(coroutine))

    def close(self) -> None:
        """Cancels what still runs and ends the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_current:
            self._thread.join(timeout=5.0)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise Unavailable("the engine is closed")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
