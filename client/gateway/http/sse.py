"""Server-sent events, and the client that goes away: noticed at once, streaming or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from allspan.protos.api.errors import RequestCancelled

T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str = "") -> bytes:
    """Returns one event with a JSON payload, and with a name for clients that listen by names."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _encode(data).encode() + b"\n\n"


class ChunkWriter:
    """Writes the events of one stream, which differ in one choice: what they share is encoded once.

    `envelope`: the fields before the choices. `after`: the fields after them.
    """

    def __init__(self, envelope: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        self._head = b"data: " + _encode(envelope)[:-1].encode() + b',"choices":['
        self._tail = self._closed(after)

    def chunk(self, choice: Mapping[str, Any], after: Mapping[str, Any] | None = None) -> bytes:
        """Returns one event; `after`, where it is given, replaces the stream's."""
        tail = self._tail if after is None else self._closed(after)
        return self._head + _encode(choice).encode() + tail

    def _closed(self, after: Mapping[str, Any]) -> bytes:
        fields = _encode(after)[1:-1].encode()
        return b"]" + (b"," + fields if fields else b"") + b"}\n\n"


class EventStream(Response):
    """Sends events as they come. `close` is awaited in any case: at the end, on a failure, and when the client goes."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        media_type: str = "text/event-stream",
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except RequestCancelled:
            return  # nobody is left to be told
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for data in events:
                await asyncio.sleep(0)  # once all that a step brought is ready: sent at one go it wakes readers less
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client goes away first, `work` is cancelled and RequestCancelled raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestCancelled("the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
