"""The accept loop of the HTTP port: a connection counts from its accept on, TLS handshake included."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.server.connections import Connections
from allspan.client.gateway.server.protocol import GuardedProtocol

BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted."""
BATCH = 32
"""Connections accepted in one turn of the loop, so that those already there get their turns, too."""
RETRY_S = 0.5
"""Seconds until the next accept after one that failed, mostly for want of files or memory."""
TLS_SHUTDOWN_S = 5.0
"""Seconds that a client has to answer the end of its TLS connection."""

logger = logging.getLogger("allspan.gateway")


class Listener:
    """Accepts the connections of one listening socket. It has asyncio.Server's methods that uvicorn calls."""

    def __init__(
        self,
        sock: socket.socket,
        connections: Connections,
        make_protocol: Callable[[], GuardedProtocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._sock = sock
        self._connections = connections
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._is_open = False
        self._retry: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        keep_alive_options(self._sock, self._connections.limits)
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._is_open = True
        self._connections.on_room = self._resume
        self._resume()

    def close(self) -> None:
        """Accepts no more, and ends connections whose TLS handshake has not ended."""
        self._pause()
        self._is_open = False
        if self._retry is not None:
            self._retry.cancel()
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening)

    def _pause(self) -> None:
        if self._is_open:
            self._loop.remove_reader(self._sock)

    def _resume(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(BATCH):
            if not self._connections.has_room:
                self._pause()  # until one of them ends
                return
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                logger.warning("no connection can be accepted for %g s: %s", RETRY_S, error.strerror)
                self._pause()
                self._retry = self._loop.call_later(RETRY_S, self._resume)
                return
            sock.setblocking(False)
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        protocol = self._make_protocol()
        task = self._loop.create_task(self._open(protocol, sock))
        self._opening.add(task)
        task.add_done_callback(partial(self._opened, protocol, sock))
        protocol.accepted(task)

    async def _open(self, protocol: GuardedProtocol, sock: socket.socket) -> None:
        limits: dict[str, float] = {}
        if self._tls is not None:
            limits = {
                "ssl_handshake_timeout": self._connections.limits.header_timeout,
                "ssl_shutdown_timeout": TLS_SHUTDOWN_S,
            }
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls, **limits)
        except OSError:  # with ssl.SSLError, and ConnectionAbortedError for a handshake that took too long
            self._connections.note_failed_handshake()

    def _opened(self, protocol: GuardedProtocol, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not protocol.is_connected:
            protocol.never_connected()
            sock.close()


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
