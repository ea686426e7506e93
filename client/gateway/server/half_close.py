"""Clients that close their sending side after a request (RFC 9112, section 9.6): they get their answer.

A client that has gone looks the same at first. On this machine the kernel's table of sockets tells the two apart. Of
another machine, what is sent to a client that has gone comes back as a reset, so something is sent: the next part of a
stream, or, before an answer begins, the interim answer 100 that every HTTP/1.1 client has to accept.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_EVERY_S = 5.0
FIRST_LOOK_S = 0.005
LONGEST_LOOK_S = 0.5
UNPROBED_S = 2.0
"""Seconds that the answer for an HTTP/1.0 client elsewhere, which knows no interim answers, may take to begin."""
NOT_LISTED_S = 1.0
"""Seconds within which a socket of this machine must be in the table, which is not read at each look."""
REUSE_FACTOR = 4
"""How many times as long as it took to read, the table of sockets is used."""
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, ANY = 4, 20, 1, 0xFFFFFFFF
HEAD_BYTES, INODE_AT = 16, 84
"""Bytes of a netlink message's head; where an answer has the socket's inode (linux/inet_diag.h)."""
TCP_CLOSED = 7
"""The state of a connection that was reset (linux/tcp_states.h)."""
NO_OWNER = "0"
"""The inode, in the table of sockets, of a socket that no process has open."""


class HalfClosed:
    """Looks at a connection whose client has closed its sending side, and ends it when the client has gone."""

    def __init__(self, transport: asyncio.Transport, running: Callable[[], RequestResponseCycle]) -> None:
        """`running`: returns the request that is being answered."""
        self._transport = transport
        self._running = running
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._probed = -PROBE_EVERY_S
        self._timer: asyncio.TimerHandle | None = None

    def look(self, wait_s: float = FIRST_LOOK_S) -> None:
        """Looks now and, in growing intervals, until `end`."""
        if self._transport.is_closing():
            return
        if self._has_left():
            self._transport.abort()
            return
        self._timer = self._loop.call_later(wait_s, self.look, min(2 * wait_s, LONGEST_LOOK_S))

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _has_left(self) -> bool:
        sock = self._transport.get_extra_info("socket")
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSED:
            return True
        owner, now = _table.owner_of_other_end(sock), self._loop.time()
        if owner or (owner is not None and now - self._since < NOT_LISTED_S):
            return owner == NO_OWNER
        running = self._running()
        if running.response_started:  # what it sends is a probe, and nothing may be put between its parts
            return False
        if running.scope["http_version"] == "1.0":
            return now - self._since > UNPROBED_S
        if now - self._probed >= PROBE_EVERY_S:
            self._probed = now
            self._transport.write(PROBE)
        return False


class SocketTable:
    """The TCP sockets of this machine. The kernel is asked for one of them, else /proc, which takes longer, is read."""

    def __init__(self) -> None:
        self._text = ""
        self._until = 0.0

    def owner_of_other_end(self, sock: socket.socket) -> str | None:
        """Returns the inode of a connection's other end, "" where it is not listed, None on another machine."""
        names = sock.getsockname(), sock.getpeername()
        (own, own_port), (other, other_port) = (_plain(name) for name in names)
        if own != other:
            return None
        if owner := _asked_of_kernel(*names):
            return owner
        _, _, found = self._read().partition(f": {own}:{other_port:04X} {own}:{own_port:04X} ")
        columns = found.split(maxsplit=7)
        return columns[6] if len(columns) > 6 else ""

    def _read(self) -> str:
        if (began := time.monotonic()) > self._until:
            try:
                self._text = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
            except OSError:
                self._text = ""
            now = time.monotonic()
            self._until = now + REUSE_FACTOR * (now - began)
        return self._text


def _asked_of_kernel(own: tuple[str, int], other: tuple[str, int]) -> str:
    """Returns the inode of a connection's other end as the kernel's sock_diag(7) tells it, "" where it does not."""
    hosts = [name[0].removeprefix("::ffff:").partition("%")[0] for name in (other, own)]
    family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
    ends = b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host in hosts)
    question = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, ANY)
    question += struct.pack("!HH", other[1], own[1]) + ends + struct.pack("=III", 0, ANY, ANY)
    head = struct.pack("=IHHII", HEAD_BYTES + len(question), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, NETLINK_SOCK_DIAG) as kernel:
            kernel.send(head + question)
            answer = kernel.recv(4096)
    except OSError:
        return ""
    if len(answer) < INODE_AT + 4 or struct.unpack_from("=H", answer, 4)[0] != SOCK_DIAG_BY_FAMILY:
        return ""
    return str(struct.unpack_from("=I", answer, INODE_AT)[0])


def _plain(name: tuple[str, int]) -> tuple[str, int]:
    """Returns an address as /proc/net/tcp has it (words in the machine's order), and the port."""
    host = name[0].removeprefix("::ffff:").partition("%")[0]
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    return "".join(packed[i : i + 4][::-1].hex().upper() for i in range(0, len(packed), 4)), name[1]


_table = SocketTable()
