"""The log of `allspan serve`: its settings and its formats."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

from allspan.protos.cluster import logs


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
