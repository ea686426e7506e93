"""Lines on the console for the user of a command. Standard output is left to results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from allspan.protos.api.wording import counted
from allspan.protos.cluster import logs

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def say(text: str) -> None:
    """Writes one line to standard error; a line that cannot be written (full disk, closed pipe) does not end the
    cluster."""
    with suppress(OSError):
        print(logs.json_line("launcher", text) if logs.is_json() else f"allspan: {text}", file=sys.stderr, flush=True)


def size(num_bytes: float) -> str:
    """`93.8 MiB`; negative and zero sizes too."""
    value = float(num_bytes)
    for unit in UNITS[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {UNITS[-1]}"


def duration(seconds: float) -> str:
    """`42 s`, `3 min`, `5 h 10 min`, `2 days`."""
    minutes, whole = divmod(int(seconds), 60)
    if not minutes:
        return f"{whole} s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {whole} s"
    days, hours = divmod(hours, 24)
    return f"{hours} h {minutes} min" if not days else f"{counted(days, 'day')} {hours} h"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells in columns set left, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
