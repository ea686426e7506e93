"""The requests that a file has recorded: when they came, and their lengths.

| columns or keys | moments | of |
|---|---|---|
| timestamp, input_length, output_length, hash_ids | milliseconds | Mooncake, JSON lines |
| Timestamp, Request tokens, Response tokens | seconds | BurstGPT, CSV or JSON lines |
| TIMESTAMP, ContextTokens, GeneratedTokens | dates | Azure's traces of LLM inference, CSV |
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import ConfigError

_FORMS = {
    "timestamp": (1000, "input_length", "output_length"),
    "Timestamp": (1, "Request tokens", "Response tokens"),
    "TIMESTAMP": (1, "ContextTokens", "GeneratedTokens"),
}
"""The column of moments → units of a second, and the columns of both lengths."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request, which came `at` seconds after the first one."""

    at: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    """Names of the prompt's blocks: equal ones are equal."""


def read_trace(path: str, most: int) -> Iterator[Recorded]:
    """Yields the first `most` requests of a file. ConfigError for one that cannot be read, naming its line."""
    first: float | None = None
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as lines:
            for number, entry in islice(_entries(lines), most):
                try:
                    request = _recorded(json.loads(entry) if isinstance(entry, str) else entry)
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                    raise ConfigError(f"--dataset-path {path}, line {number}: {error!r}") from None
                first = request.at if first is None else first
                yield Recorded(max(0.0, request.at - first), request.input_len, request.output_len, request.blocks)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--dataset-path {path}: {error}") from None
    if first is None:
        raise ConfigError(f"--dataset-path {path} is empty")


def _entries(lines: Iterable[str]) -> Iterator[tuple[int, str | Mapping[str, Any]]]:
    """Yields the number of each line and its JSON, or its values by the columns that the first line names."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, head in numbered:
        if head.lstrip()[0] in "{[" or "," not in head:
            yield from chain([(number, head)], numbered)
            return
        columns = next(csv.reader([head]))
        for row, line in numbered:
            yield row, dict(zip(columns, next(csv.reader([line])), strict=False))


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    """`at` is as the file has it."""
    moments = next((each for each in _FORMS if each in entry), None)
    if moments is None:
        raise KeyError(" or ".join(_FORMS))
    units, inputs, outputs = _FORMS[moments]
    input_len, output_len = (max(1, int(float(entry[column]))) for column in (inputs, outputs))
    if not math.isfinite(at := _seconds(entry[moments]) / units):
        raise ValueError(f"{moments} is {at}, must be finite")
    return Recorded(at, input_len, output_len, tuple(map(int, entry.get("hash_ids", ()))))


def _seconds(moment: Any) -> float:
    if not isinstance(moment, str) or "-" not in moment[1:]:
        return float(moment)
    date = datetime.fromisoformat(moment)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
