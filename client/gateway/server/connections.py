"""The HTTP connections of one server: their number, and which of them go where there are too many."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.sockets import RESERVED_FILES

SPARE = 32
"""Number of connections beyond the limit that are told there is no room."""
WARN_AFTER_S = 1.0
WARN_EVERY_S = 10.0

logger = logging.getLogger("allspan.gateway")


class Connection(Protocol):
    """A connection from its accept to its end."""

    def evict(self) -> None:
        """Ends it at once, to make room for another."""


class Connections:
    """The HTTP connections of one server: their number, and which of them wait for a request.

    Where there is no room for a new one, another goes that has no request: of those that have never sent one (TLS
    handshakes among them) the oldest, once these are more than half, else the one that has been idle longest.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self.limits = limits
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = min(limits.max_connections, max(files - RESERVED_FILES, 1))
        self.new: dict[Connection, None] = {}
        """Holds those that have not sent the head of a request yet, in the order of their arrival."""
        self.idle: dict[Connection, None] = {}
        """Holds those between two requests, the longest idle one first."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when one ends while `has_room` is false."""
        self._open: set[Connection] = set()
        self._log = PressureLog(self.most, limits.header_timeout)

    @property
    def has_room(self) -> bool:
        """Whether one more can be accepted, if only to be told that there is no room."""
        return len(self._open) < self.most + SPARE

    def add(self, connection: Connection) -> bool:
        """Counts a new connection and makes room for it. False when all others are at work."""
        is_full = len(self._open) >= self.most
        has_place = not is_full or self._evict()
        if not has_place:
            self._log.note(refused=1)
        self._open.add(connection)
        self.new[connection] = None
        return has_place

    def remove(self, connection: Connection) -> None:
        """Counts a connection no more. Idempotent."""
        was_full = not self.has_room
        self.no_longer_waiting(connection)
        self._open.discard(connection)
        if was_full and self.has_room:
            self.on_room()

    def no_longer_waiting(self, connection: Connection) -> None:
        """A connection has sent the head of a request, or is about to end."""
        self.new.pop(connection, None)
        self.idle.pop(connection, None)

    def note_failed_handshake(self) -> None:
        self._log.note(handshakes=1)

    def _evict(self) -> bool:
        waiting = self.new if len(self.new) > self.most // 2 or not self.idle else self.idle
        oldest = next(iter(waiting), None)
        if oldest is None:
            return False
        self._log.note(**{"new" if waiting is self.new else "idle": 1})
        self.remove(oldest)
        oldest.evict()
        return True


class PressureLog:
    """One log line at most each WARN_EVERY_S about connections that were closed, refused or not established."""

    def __init__(self, most: int, header_timeout: float) -> None:
        self._most = most
        self._header_timeout = header_timeout
        self._counts: Counter[str] = Counter()
        self._next = 0.0

    def note(self, **counts: int) -> None:
        """Adds to the counts; the line comes within a second, or WARN_EVERY_S after the one before."""
        loop = asyncio.get_running_loop()
        if not self._counts:
            loop.call_at(max(loop.time() + WARN_AFTER_S, self._next), self._tell)
        self._counts.update(counts)

    def _tell(self) -> None:
        counts, self._counts = self._counts, Counter()
        self._next = asyncio.get_running_loop().time() + WARN_EVERY_S
        if counts["new"] or counts["idle"] or counts["refused"]:
            logger.warning(
                "%d HTTP connections, the most there may be (--max-connections): for new ones, %d were closed that had "
                "sent no request and %d that were idle; %d new ones were refused",
                *(self._most, counts["new"], counts["idle"], counts["refused"]),
            )
        if counts["handshakes"]:
            logger.info(
                "%d TLS handshakes failed or did not end within %g s (--header-timeout)",
                *(counts["handshakes"], self._header_timeout),
            )
