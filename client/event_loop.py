"""The asyncio loop that an engine's results arrive on, for synchronous callers on any thread and callers on loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from allspan.protos.api.errors import Unavailable

T = TypeVar("T")


class HomeLoop:
    """Runs coroutines on an existing event loop; refuses with Unavailable once closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._closed = False
        self._lock = threading.Lock()

    @property
    def is_current(self) -> bool:
        """True if the caller is on the loop itself, which must not wait for it."""
        return asyncio._get_running_loop() is self._loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it to its end from another thread; an exception here (Ctrl-C) cancels it."""
        future = self._submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """`run` from this loop or another; cancelling it cancels the coroutine."""
        if self.is_current:
            self._check_open(coroutine)
            return await coroutine
        return await asyncio.wrap_future(self._submit(coroutine))

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            self._check_open(coroutine)
            try:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except RuntimeError as error:  # its owner closed the loop between the check and the call
                coroutine.close()
                raise Unavailable("the engine is closed") from error

    def _check_open(self, coroutine: Coroutine[Any, Any, object] | None = None) -> None:
        if self._closed or self._loop.is_closed():
            if coroutine is not None:
                coroutine.close()
            raise Unavailable("the engine is closed")


class LoopThread(HomeLoop):
    """A loop of its own in a daemon thread; `close` ends both."""

    def __init__(self, name: str) -> None:
        super().__init__(asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancels what still runs and ends the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_current:
            self._thread.join(timeout=5.0)

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
