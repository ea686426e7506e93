"""JSON schemas of growing difficulty, each with values that it admits and values that it does not, and who judges."""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema

FILE = Path(__file__).with_name("json_schemas.json")


@dataclass(frozen=True)
class Case:
    """One schema."""

    name: str
    schema: Any
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


def cases() -> list[Case]:
    """All of json_schemas.json."""
    return [
        Case(**entry | {"valid": tuple(entry["valid"]), "invalid": tuple(entry["invalid"])}) for entry in _entries()
    ]


def is_valid(schema: Any, value: Any) -> bool:
    """As JSON Schema says (formats included), judged by jsonschema and, for formats, by the standard library."""
    judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(judge(schema, format_checker=_FORMATS).is_valid(value))


def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(FILE.read_text())
    return entries


_FORMATS = jsonschema.FormatChecker(formats=())
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_PATTERNS = {
    "duration": r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)",
    "email": r"[^@\s]+@[^@\s]+",
    "hostname": rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]*",
    "uuid": r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}
_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"


def _text(pattern: str) -> Any:
    return lambda value: not isinstance(value, str) or re.fullmatch(pattern, value, re.ASCII) is not None


def _date(value: object) -> bool:
    return not isinstance(value, str) or (len(value) == 10 and bool(date.fromisoformat(value)))


def _date_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    day, time = value[:10], value[11:]
    return _date(day) and value[10:11] in ("T", "t") and re.fullmatch(_TIME, time, re.ASCII) is not None


def _address(family: Any) -> Any:
    return lambda value: not isinstance(value, str) or bool(family(value))


for _name, _pattern in _PATTERNS.items():
    _FORMATS.checks(_name)(_text(_pattern))
_FORMATS.checks("time")(_text(_TIME))
_FORMATS.checks("date", ValueError)(_date)
_FORMATS.checks("date-time", ValueError)(_date_time)
_FORMATS.checks("ipv4", ValueError)(_address(ipaddress.IPv4Address))
_FORMATS.checks("ipv6", ValueError)(_address(ipaddress.IPv6Address))
