"""Limits on HTTP connections: idle ones, slow or oversized request heads, clients that do not read their answer, and
their number."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.http.body import UNREAD_S
from allspan.client.gateway.http.errors import HttpError, response_of

BODY_MARGIN_S = UNREAD_S + 3.0
"""Seconds beyond --body-timeout after which a connection is closed whose route has not answered by itself."""
RESERVED_FILES = 256
"""Number of this process's open files that are not for HTTP connections."""
WARN_EVERY_S = 10.0

logger = logging.getLogger("allspan.gateway")


class Connections:
    """The HTTP connections of one server: their number, and which of them are idle."""

    def __init__(self, limits: LimitsConfig) -> None:
        self.limits = limits
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = min(limits.max_connections, max(files - RESERVED_FILES, 1))
        self.open = 0
        self.idle: dict[GuardedProtocol, None] = {}
        """The connections without a request, the longest idle one first."""
        self._warned = -WARN_EVERY_S

    def make_room(self) -> bool:
        """Makes room for a new connection by closing the oldest idle one. False when all are at work."""
        if self.open <= self.most:
            return True
        oldest = next(iter(self.idle), None)
        if (now := time.monotonic()) - self._warned >= WARN_EVERY_S:
            self._warned = now
            what = "new ones are refused" if oldest is None else "the oldest idle one goes for each new one"
            logger.warning("%d HTTP connections, the most there may be (--max-connections): %s", self.most, what)
        if oldest is not None:
            oldest.drop()
        return oldest is not None


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a deadline for every wait for the client."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = connections
        self._limits = connections.limits
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.open += 1
        if not self._all.make_room():
            self.app = _no_room
        self._all.idle[self] = None
        self._wait(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.open -= 1
        self._all.idle.pop(self, None)
        self._wait(None)
        self._wait_for_reader(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.max_header_bytes:
            self._refuse(HttpError(431, f"the headers are larger than {self._limits.max_header_bytes} bytes"))
        elif self._in_head and self._deadline is None:  # blank lines between requests are no request
            self._wait(self._limits.header_timeout)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait(self._limits.header_timeout)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._all.idle.pop(self, None)
        self._wait(self._limits.body_timeout + BODY_MARGIN_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._wait(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reader(True)  # for what is still on its way
        elif not self.pipeline and self._in_head:
            self._all.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._wait_for_reader(False)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignores an upgrade to WebSocket or HTTP/2, which the client can do without."""

    def send_400_response(self, msg: str) -> None:
        self._refuse(HttpError(400, "this is no valid HTTP/1.1 request"))

    def timeout_keep_alive_handler(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Closes the connection."""
        self._all.idle.pop(self, None)
        self.transport.close()
        self._wait_for_reader(True)

    def _wait(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _wait_for_reader(self, waits: bool) -> None:
        if self._write_deadline is not None:
            if waits:
                return
            self._write_deadline.cancel()
            self._write_deadline = None
        elif waits:
            self._write_deadline = self.loop.call_later(self._limits.write_timeout, self._unread)

    def _too_slow(self) -> None:
        """The request has not come. Who has sent nothing of it hears nothing."""
        self._deadline = None
        if self._is_answering and self._in_head:
            self._wait(self._limits.header_timeout)  # it has sent ahead, and has an answer to read first
        elif self._in_head and self._head_bytes:
            self._refuse(HttpError(408, f"the headers did not arrive within {self._limits.header_timeout:g} s"))
        else:
            self.drop()

    def _unread(self) -> None:
        self._write_deadline = None
        logger.info("a client took nothing for %g s and was cut off", self._limits.write_timeout)
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: HttpError) -> None:
        """Answers data that is not a complete request, which has no route to answer it. Never into the middle of
        another answer."""
        if self.transport.is_closing():
            return
        if not self._is_answering:
            logger.info("refused a connection with %d: %s", error.http_status, error.message)
            self.transport.write(_on_the_wire(response_of(error)))
        self.drop()


def keep_alive_options(sock: socket.socket, limits: LimitsConfig) -> None:
    """Sets the keep-alive options of a listening socket, inherited by its connections: a peer that has vanished, or
    that does not read its data, is disconnected."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 30),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(1000 * limits.write_timeout)),
    ):
        if hasattr(socket, name):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _no_room(scope: Scope, receive: Receive, send: Send) -> None:
    error = HttpError(503, "the server has no room for another connection; try again later")
    response = response_of(error)
    response.headers.update({"Connection": "close", "Retry-After": "1"})
    await response(scope, receive, send)


def _on_the_wire(response: Response) -> bytes:
    response.headers["Connection"] = "close"
    head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
    return STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body)
