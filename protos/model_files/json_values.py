"""JSON of a model's files, read strictly: no key twice, no Infinity, no depth or number of values that only harms."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.limits import MAX_CONFIG_BYTES, MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_MESSAGE_CHARS
from allspan.protos.model_files.regular_file import read_regular

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object that a file holds. Raises CheckpointError naming the file and what is wrong with it."""
    return parse_object(read_regular(path, limit), str(path))


def parse_object(data: bytes, source: str) -> dict[str, Any]:
    """The JSON object that `data` is; `source` is what messages name. Raises CheckpointError."""
    _check_text(data, source)
    try:
        values = json.loads(data, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_float)
        if isinstance(values, dict):
            _check_depth(values)
        if _SURROGATE.search(data):
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{source} cannot be read as JSON: it holds half of a surrogate pair") from error
    except (RecursionError, _TooDeepError) as error:
        raise CheckpointError(
            f"{source} nests objects and lists more than {MAX_JSON_DEPTH} deep, which is the limit"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{source} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{source} holds {_kind(values)}, must be a JSON object")
    return values


def _check_text(data: bytes, source: str) -> None:
    """Checks what shows before the text is parsed. Raises CheckpointError."""
    if not data.strip():
        raise CheckpointError(f"{source} is empty, must be a JSON object: fetch the model again")
    if data.startswith(b"\xef\xbb\xbf"):
        raise CheckpointError(f"{source} begins with a byte order mark: save it as UTF-8 without one")
    num_values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if num_values > MAX_JSON_VALUES:
        raise CheckpointError(f"{source} has {num_values} JSON values or more, must have at most {MAX_JSON_VALUES}")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{source} cannot be read as JSON: byte {data[error.start]:#04x} at {error.start} is not UTF-8"
        ) from error


def shown(value: object) -> str:
    """A value as messages show it: in one line, cut where it is long."""
    if isinstance(value, str | bytes):
        text = repr(value[: MAX_MESSAGE_CHARS + 1])
    elif isinstance(value, int) and value.bit_length() > 4 * MAX_MESSAGE_CHARS:
        return f"an integer of {value.bit_length()} bits"
    elif isinstance(value, dict | list | tuple) and len(value) > MAX_MESSAGE_CHARS:
        return f"{_kind(value)} with {len(value)} entries"
    else:
        text = repr(value)
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"


class _TooDeepError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} is there twice: remove one")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number: give a finite one")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:MAX_MESSAGE_CHARS]} is larger than a float can be: give a finite one")
    return value


def _check_depth(values: dict[str, Any]) -> None:
    stack: list[Iterator[Any]] = [iter(values.values())]
    while stack:
        for value in stack[-1]:
            if isinstance(value, dict | list):
                if len(stack) >= MAX_JSON_DEPTH:
                    raise _TooDeepError
                stack.append(iter(value.values() if isinstance(value, dict) else value))
                break
        else:
            stack.pop()


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
