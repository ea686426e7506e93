"""The log of `allspan serve`: its settings, its formats, and its copy in the run directory."""

from __future__ import annotations

import io
import logging
import os
import select
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from allspan.protos.cluster import logs

KEPT_BYTES = 1 << 20
"""Size of a log's copy at which it is set aside for a new one; one that was set aside before is removed."""
WAIT_S = 1.0
"""Seconds that a line waits for a slow reader of standard error that does not block."""


@dataclass(frozen=True)
class LogConfig:
    """Lines on standard error."""

    log_level: Literal["", "debug", "info", "warning", "error"] = ""
    """Sets the least severe level that is logged; empty takes the variable ALLSPAN_LOG_LEVEL, else info."""
    log_format: Literal["", "text", "json"] = ""
    """Logs lines of text, or one JSON object on each line; empty takes the variable ALLSPAN_LOG_FORMAT, else text."""
    log_requests: bool = True
    """Logs one line for each request that ends or is refused, never with its text. Failed requests are logged in any
    case."""


def begin_log(config: LogConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets this process's log up, and that of all that it starts."""
    if config.log_level:
        environment[logs.LEVEL] = config.log_level
    if config.log_format:
        environment[logs.FORMAT] = config.log_format
    logs.configure("gateway", environment)
    logging.getLogger(logs.REQUESTS).setLevel(logging.NOTSET if config.log_requests else logging.WARNING)


class ForeignLines:
    """Wraps lines of other programs (mpirun, a traceback at a rank's end) in JSON objects, one a line, among the JSON
    log."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._rest = b""

    def pass_on(self, data: bytes) -> bytes:
        """Returns the whole lines of `data` and of earlier data held back."""
        *lines, self._rest = (self._rest + data.replace(b"\r", b"\n")).split(b"\n")
        return b"".join(self._wrapped(line) for line in lines if line.strip())

    def _wrapped(self, line: bytes) -> bytes:
        if line.startswith(b'{"time": '):
            return line + b"\n"
        return logs.json_line(self._source, line.decode(errors="replace").strip()).encode() + b"\n"


class LogCopy(io.RawIOBase):
    """Standard error, with a copy of what is written to it in a file that `allspan logs` reads.

    It has no lock: a signal's handler may write while a line is being written. A line that standard error does not take
    (a full disk, a closed pipe) is lost there: that is no reason for a cluster to end.
    """

    def __init__(self, number: int) -> None:
        """`number`: the file descriptor of standard error."""
        self._number = number
        self._file: int | None = None
        self._path: Path | None = None
        self._size = 0
        self._early = b""

    def keep_in(self, path: Path) -> None:
        """Copies what was written so far, and what will be, to `path`."""
        self._path = path
        self._copy(self._early)
        self._early = b""

    def write(self, data: Any) -> int:
        text = bytes(data)
        if self._path is not None:
            self._copy(text)
        else:
            self._early = (self._early + text)[-KEPT_BYTES:]
        left = memoryview(text)
        with suppress(OSError):
            while left:
                try:
                    left = left[os.write(self._number, left) :]
                except BlockingIOError:
                    if not select.select([], [self._number], [], WAIT_S)[1]:
                        break
        return len(text)

    def close(self) -> None:
        """Ends the copy; standard error stays open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        super().close()

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def _copy(self, text: bytes) -> None:
        assert self._path is not None
        with suppress(OSError):  # a full disk, or the run directory is gone: then the cluster is about to end
            if self._file is None or self._size + len(text) > KEPT_BYTES:
                if self._file is not None:
                    os.close(self._file)
                    self._file = None
                    self._path.replace(f"{self._path}.1")
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                self._size = 0
            self._size += os.write(self._file, text)


def copy_stderr() -> LogCopy | None:
    """Puts a LogCopy in the place of `sys.stderr`, before anything logs; None when standard error is no file."""
    try:
        copy = LogCopy(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # closed, or a program's own stand-in
        return None
    sys.stderr.flush()
    encoding = sys.stderr.encoding
    sys.stderr = io.TextIOWrapper(copy, encoding, "backslashreplace", line_buffering=True)
    return copy
