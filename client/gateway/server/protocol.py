"""uvicorn's HTTP protocol with a deadline for every wait for the client, and an answer to whatever is no request."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import httptools
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from allspan.client.gateway.http.body import UNREAD_S
from allspan.client.gateway.http.errors import HttpError, response_of
from allspan.client.gateway.server.connections import Connections
from allspan.client.gateway.server.framing import check_head, without_upgrade
from allspan.client.gateway.server.half_close import HalfClosed

BODY_MARGIN_S = UNREAD_S + 3.0
"""Seconds beyond --body-timeout after which a connection is closed whose route has not answered by itself."""

logger = logging.getLogger("allspan.gateway")


class GuardedProtocol(HttpToolsProtocol):
    """One HTTP connection, from its accept on: until its TLS handshake has ended it has no transport."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = connections
        self._limits = connections.limits
        self._opening: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._has_begun = False
        """Whether part of a request's head has come."""
        self._running: RequestResponseCycle | None = None
        """The request that was answered last, or is being answered; `cycle` is the one that came last."""
        self._refusal: HttpError | None = None
        """The reason why nothing more is read."""
        self._half_closed: HalfClosed | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the transport has been made, and with TLS the handshake has ended."""
        return self.transport is not None

    def accepted(self, opening: asyncio.Task[None]) -> None:
        """Counts the connection; `opening` makes its transport."""
        self._opening = opening
        if not self._all.add(self):
            self.app = _no_room

    def never_connected(self) -> None:
        """The connection ended before there was a transport."""
        self._all.remove(self)

    def evict(self) -> None:
        """Ends the connection at once; it sends nothing, and reads no answer."""
        if not self.is_connected:
            assert self._opening is not None
            self._opening.cancel()
        elif self.scheme == "https" or self.transport.get_write_buffer_size():
            self.transport.abort()  # nobody waits for the client
        else:
            self.drop()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._wait(None)
        self._wait_for_reader(False)
        if self._half_closed is not None:
            self._half_closed.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return  # it comes after what was refused
        self._unset_keepalive_if_required()
        if self._in_head:
            self._head_bytes += len(data)
        self._feed(data)
        if self._refusal is not None:
            return
        if self._in_head and self._head_bytes > self._limits.max_header_bytes:
            self._refuse(HttpError(431, f"the headers are larger than {self._limits.max_header_bytes} bytes"))
        elif self._in_head and self._deadline is None:  # blank lines between requests are no request
            self._wait(self._limits.header_timeout)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            version, method = self.parser.get_http_version(), self.parser.get_method()
            head = without_upgrade(version, method, self.url, self.headers)
            self.parser = httptools.HttpRequestParser(self)
            self._feed(head + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            known = error.__context__
            self._refuse(known if isinstance(known, HttpError) else HttpError(400, "this is no valid HTTP/1.1 request"))

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True: it is still to be answered."""
        if self._refusal is not None:
            return False
        if self._has_begun or not self._in_head:
            self._refuse(HttpError(400, "the connection was closed in the middle of a request"))
        if self.scheme == "https" or not self._is_answering:
            return False  # an end of TLS is an end of both directions
        if self._half_closed is None and hasattr(socket, "TCP_INFO"):
            self._half_closed = HalfClosed(self.transport, lambda: self._running)  # type: ignore[arg-type,return-value]
            self._half_closed.look()
        return self._half_closed is not None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._wait(self._limits.header_timeout)

    def on_headers_complete(self) -> None:
        check_head(self.parser.get_http_version(), self.parser.get_method(), self.url, self.headers)
        if self.parser.should_upgrade():
            return  # without a body: `_feed` begins again, as the client can do without WebSocket or HTTP/2
        self._in_head, self._has_begun, self._head_bytes = False, False, 0
        self._all.no_longer_waiting(self)
        self._wait(self._limits.body_timeout + BODY_MARGIN_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = True
        self._wait(None)
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins the next answer, if another request has come
        if self.transport.is_closing():
            self._wait_for_reader(True)  # for what is still on its way
        elif self._is_answering:
            return
        elif self._refusal is not None:
            self._end_with(self._refusal)
        elif self._half_closed is not None:
            self.drop()
        elif self._in_head:
            self._all.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._wait_for_reader(False)

    def timeout_keep_alive_handler(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Closes the connection."""
        self._all.no_longer_waiting(self)
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
        if self._refusal is not None:
            self.drop()
        elif self._is_answering and self._in_head:
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
        running = self._running
        return running is not None and not running.response_complete and not running.disconnected

    def _refuse(self, error: HttpError) -> None:
        """Answers data that is not a complete request, which has no route to answer it: after the answers to earlier
        requests, and never into the middle of one."""
        if self.transport.is_closing():
            return
        self._refusal = error
        logger.info("refused a connection with %d: %s", error.http_status, error.message)
        if not self._in_head and not self._forget_newest():
            self.drop()
        elif not self._is_answering:
            self._end_with(error)

    def _forget_newest(self) -> bool:
        """Ends the request whose body is broken. False when its answer has begun, or is there already."""
        newest = self.cycle
        if newest is not self._running:
            self.pipeline.popleft()
            return True
        if newest.response_started:
            return False
        newest.disconnected = True
        newest.message_event.set()
        return True

    def _end_with(self, error: HttpError) -> None:
        """Sends an answer and ends the connection. What the client still sends is read for a while: closing on it would
        cost it the answer."""
        self.transport.write(_on_the_wire(response_of(error)))
        if self._half_closed is not None or not self.transport.can_write_eof():
            self.drop()
            return
        self.transport.write_eof()
        self._all.new[self] = None
        self._wait(UNREAD_S)


async def _no_room(scope: Scope, receive: Receive, send: Send) -> None:
    error = HttpError(503, "the server has no room for another connection; try again later")
    response = response_of(error)
    response.headers.update({"Connection": "close", "Retry-After": "1"})
    await response(scope, receive, send)


def _on_the_wire(response: Response) -> bytes:
    response.headers["Connection"] = "close"
    head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
    return STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body)
