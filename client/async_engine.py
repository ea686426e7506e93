"""`ClientEngine` for a program that runs on one asyncio loop, as the gateway does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from allspan.client.engine import ClientEngine
from allspan.client.event_loop import HomeLoop
from allspan.protos import worker_pb2 as pb


class AsyncClientEngine(ClientEngine):
    """An engine whose results arrive on `loop` itself rather than on a thread of their own: their reader is woken
    without a system call or another thread.

    Make and close it on another thread while the loop runs; on the loop, call only the methods for asyncio and
    `release_request`. `options`: those of `ClientEngine`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        self._given = loop
        super().__init__(**options)

    def _home_loop(self) -> HomeLoop:
        return HomeLoop(self._given)

    def page_events(self) -> list[AsyncGenerator[pb.PageEvents, None]]:
        """The changes of each replica's prefix cache, with token ids, from now on and as long as they are read."""
        return self._session.page_events()
