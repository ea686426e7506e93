"""Every process's log lines: text or JSON, with times that name their zone."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime

from allspan.protos.cluster import logs


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("allspan.x", logging.WARNING, __file__, 1, message, ("line\nbreak",), None)
    made.__dict__.update(extra)
    return made


def test_a_line_of_text_has_an_iso_time_with_its_zone() -> None:
    line = logs.TextFormatter("rank 3, 100%").format(record("said %s"))
    time, rest = line.split(" ", 1)
    assert datetime.fromisoformat(time).tzinfo is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", time)
    assert rest == "WARNING [rank 3, 100%] said line\nbreak"


def test_a_json_line_is_one_object_with_the_record_s_fields() -> None:
    line = logs.JsonFormatter("gateway").format(
        record("said %s", fields={"id": "1", "ttft_s": None, "level": "forged"})
    )
    assert "\n" not in line
    told = json.loads(line)
    assert datetime.fromisoformat(told.pop("time")).tzinfo is not None
    assert told == {"level": "warning", "source": "gateway", "message": "said line\nbreak", "id": "1", "ttft_s": None}


def test_a_traceback_stays_within_its_json_line() -> None:
    try:
        raise ValueError("bad")
    except ValueError as error:
        made = record("failed %s", exc_info=(ValueError, error, error.__traceback__))
    told = json.loads(logs.JsonFormatter("gateway").format(made))
    assert told["traceback"].endswith("ValueError: bad")
