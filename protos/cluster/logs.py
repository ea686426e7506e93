"""The log format of every process of a cluster: a line a record, as text or as a JSON object.

Two variables tell it, so that what a process starts writes alike: ALLSPAN_LOG_LEVEL ("debug", "info", "warning",
"error") and ALLSPAN_LOG_FORMAT ("text", "json"). Times are ISO 8601, with milliseconds and the zone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

LEVEL, FORMAT = "ALLSPAN_LOG_LEVEL", "ALLSPAN_LOG_FORMAT"
LEVELS = ("debug", "info", "warning", "error")
REQUESTS = "allspan.gateway.requests"
"""The logger of lines about single requests."""


def configure(source: str, environment: Mapping[str, str] = os.environ) -> None:
    """Makes this process log to standard error; `source` names it in every line. A second call replaces the first."""
    level = environment.get(LEVEL, "info").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(source) if is_json(environment) else TextFormatter(source))
    logging.basicConfig(level=level if level.lower() in LEVELS else "INFO", handlers=[handler], force=True)
    logging.captureWarnings(True)


def is_json(environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get(FORMAT) == "json"


def json_line(source: str, message: str, level: str = "info") -> str:
    """A line that no logger wrote, as the loggers' are."""
    return _object(datetime.now().astimezone(), level, source, message, {})


class TextFormatter(logging.Formatter):
    """2026-11-22T06:44:48.123+01:00 INFO [gateway] message"""

    def __init__(self, source: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s [{source.replace('%', '%%')}] %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """{"time", "level", "source", "message"}, then what the record has in `extra={"fields": {…}}`, then the "traceback"
    of an exception."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        if record.exc_text:
            fields["traceback"] = record.exc_text
        elif record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return _object(_time(record), record.levelname.lower(), self._source, record.getMessage(), fields)


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created).astimezone()


def _object(time: datetime, level: str, source: str, message: str, fields: dict[str, Any]) -> str:
    head = {"time": time.isoformat(timespec="milliseconds"), "level": level, "source": source, "message": message}
    return json.dumps(head | {name: value for name, value in fields.items() if name not in head}, ensure_ascii=False)
