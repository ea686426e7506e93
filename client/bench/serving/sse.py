"""An HTTP client for event streams that costs little: one socket, one request at a time, kept open between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from allspan.protos.api.errors import ConfigError

OnEvent = Callable[[float, bytes], None]
"""(when its bytes came, `time.perf_counter()`; an event's data, without "data: ")."""


class HttpFailure(Exception):
    """An answer that is no success. `status` is 0 when the connection failed or what came is no HTTP."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class SseConnection(asyncio.Protocol):
    """`await ask(…)` again and again; after a failure it connects anew."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[bytes] | None = None
        self._reset(None)

    async def ask(self, method: str, path: str, headers: dict[str, str], body: bytes, on_event: OnEvent) -> bytes:
        """Sends a request and returns the body of an answer that is no event stream; b"" after a stream, whose events
        went to `on_event`. Raises HttpFailure."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}:{self._port}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        message = "\r\n".join([*lines, "", ""]).encode() + body
        is_kept = self._transport is not None
        try:
            return await self._send(message, on_event)
        except HttpFailure:
            if not is_kept or self._has_heard:
                raise
            return await self._send(message, on_event)  # the server had closed what was kept open
        except BaseException:
            self.close()
            raise

    async def _send(self, message: bytes, on_event: OnEvent) -> bytes:
        loop = asyncio.get_running_loop()
        if self._transport is None:
            try:
                await loop.create_connection(lambda: self, self._host, self._port)
            except OSError as error:
                raise HttpFailure(0, f"cannot connect to {self._host}:{self._port}: {error.strerror}") from None
        assert self._transport is not None
        self._reset(on_event)
        self._done = loop.create_future()
        self._transport.write(message)
        return await self._done

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of that class

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(HttpFailure(0, f"the connection broke: {error or 'closed by the server'}"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._has_heard = True
        self._unread += data
        try:
            if self._in_headers and not self._read_headers():
                return
            ended = self._read_chunks() if self._is_chunked else self._read_plain()
        except (ValueError, IndexError) as error:
            self._fail(HttpFailure(0, f"the answer is no HTTP: {error}"))
            return
        if self._is_stream:
            self._read_events(now)
        if ended:
            self._end()

    def _reset(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event
        self._unread = b""
        self._body = b""
        self._in_headers = True
        self._has_heard = False
        self._is_chunked = self._is_stream = False
        self._status = self._left = 0

    def _read_headers(self) -> bool:
        head, end, rest = self._unread.partition(b"\r\n\r\n")
        if not end:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._status = int(first.split(" ")[1])
        self._is_chunked = headers.get("transfer-encoding", "") == "chunked"
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream") and self._status == 200
        self._left = 0 if self._is_chunked else int(headers.get("content-length", "0"))
        self._unread, self._in_headers = rest, False
        return True

    def _read_plain(self) -> bool:
        self._body += self._unread
        self._left -= len(self._unread)
        self._unread = b""
        return self._left <= 0

    def _read_chunks(self) -> bool:
        """Reads the chunks that have come; returns whether the last one was among them."""
        start, data = 0, self._unread
        while (line_end := data.find(b"\r\n", start)) >= 0:
            size = int(data[start:line_end].partition(b";")[0], 16)
            if len(data) < line_end + size + 4:
                break
            self._body += data[line_end + 2 : line_end + 2 + size]
            start = line_end + size + 4
            if not size:
                return True
        self._unread = data[start:]
        return False

    def _read_events(self, now: float) -> None:
        *events, self._body = self._body.split(b"\n\n")
        if self._on_event is not None:
            for event in events:
                if event.startswith(b"data: "):
                    self._on_event(now, event[6:])

    def _end(self) -> None:
        if self._done is None or self._done.done():
            return
        if self._status == 200:
            self._done.set_result(b"" if self._is_stream else self._body)
        else:
            self._fail(HttpFailure(self._status, self._body.decode("utf-8", "replace")))

    def _fail(self, failure: HttpFailure) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(failure)


def host_and_port(base_url: str) -> tuple[str, int]:
    """Returns the host and the port of a plain HTTP address. ConfigError for any other."""
    parts = urlsplit(base_url)
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        raise ConfigError(f"--base-url is {base_url!r}, must be http://HOST:PORT")
    return parts.hostname, port
