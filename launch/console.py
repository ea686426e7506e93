"""Lines on the console for the user of a command. Standard output is left to results."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

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


def is_terminal() -> bool:
    """Returns whether standard error is a terminal, where a progress bar can redraw itself."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
