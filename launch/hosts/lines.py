"""JSON objects, one a line, over a pipe that may stop taking or giving data at any time."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from allspan.launch.hosts.messages import BEAT_S
from allspan.protos.api.errors import InternalError

MAX_LINE_BYTES = 64 << 20
MAX_WAITING = 10_000
"""Most messages that wait for a pipe that takes none."""
STALL_S = 4 * BEAT_S
"""Seconds between two looks at a clock after which this process must have stood still: it cannot judge the other."""


class LineWriter:
    """Writes messages and, while there is none, a beat every BEAT_S, from a thread of its own: a caller never waits
    for the pipe."""

    def __init__(self, fd: int, beat: Callable[[], dict[str, Any]], name: str) -> None:
        """`beat` makes the message that is sent while there is nothing else to say."""
        self._fd = fd
        self._beat = beat
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, message: dict[str, Any]) -> None:
        """Raises InternalError when the pipe has taken nothing for long."""
        try:
            self._queue.put_nowait(message)
        except queue.Full as error:
            raise InternalError(f"{MAX_WAITING} messages wait for a pipe that takes none") from error

    def close(self, timeout_s: float) -> bool:
        """Writes what waits, for at most `timeout_s`; returns whether the descriptor, which stays open, is free."""
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                message = self._queue.get(timeout=max(0.0, due - time.monotonic()))
                if message is None:
                    return
            except queue.Empty:
                message = self._beat()
                due = time.monotonic() + BEAT_S
            data = json.dumps(message).encode() + b"\n"
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                return  # the reader is gone, which the other direction notices


class LineBuffer:
    """Splits what is read from a pipe into JSON objects; skips lines that are none, such as a login shell's."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Returns the objects that `data` completes. Raises InternalError for a line that is too long."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise InternalError(f"a line has more than {MAX_LINE_BYTES} bytes")
        found = []
        for line in lines:
            with suppress(ValueError):
                if isinstance(value := json.loads(line), dict):
                    found.append(value)
        return found


class Silence:
    """Counts the seconds for which another process was silent while this one ran."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at = time.monotonic()

    def heard(self) -> None:
        self.seconds = 0.0
        self._looked_at = time.monotonic()

    def look(self) -> float:
        """Returns the seconds of silence. Call it at least every BEAT_S: a longer gap starts the count anew."""
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        self.seconds = 0.0 if elapsed > STALL_S else self.seconds + elapsed
        return self.seconds
