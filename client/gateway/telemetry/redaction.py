"""A log filter that takes API keys out of the gateway's lines, wherever a caller has put one by mistake."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from allspan.protos.cluster.logs import REQUESTS

LOGGERS = ("allspan.gateway", REQUESTS)
_FORMATTER = logging.Formatter()


class Redaction(logging.Filter):
    """Rewrites records, tracebacks included, with `hide`, which returns a text without keys."""

    def __init__(self, hide: Callable[[str], str]) -> None:
        super().__init__()
        self._hide = hide

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._hide(record.getMessage()), None
        if record.exc_info:
            record.exc_text, record.exc_info = self._hide(_FORMATTER.formatException(record.exc_info)), None
        if isinstance(fields := getattr(record, "fields", None), dict):
            record.fields = {
                name: self._hide(value) if isinstance(value, str) else value for name, value in fields.items()
            }
        return True


@contextlib.contextmanager
def without_keys(hide: Callable[[str], str]) -> Iterator[None]:
    """Filters the gateway's lines inside the block."""
    redaction = Redaction(hide)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for each in loggers:
        each.addFilter(redaction)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(redaction)
