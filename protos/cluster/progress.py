"""Progress of work that takes long, alike in every command: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from allspan.protos.cluster import logs

QUARTERS = 4
LINE_EVERY_S = 15.0
"""Seconds between lines where the total is not known."""


class Progress:
    """Call it with what is done so far, and the total if that was not known before; use it as a context manager.

    `unit` "B" counts bytes; any other is the plural of what is counted, as "requests".
    """

    def __init__(self, title: str, total: int = 0, unit: str = "B") -> None:
        self._title = title
        self._total = total
        self._unit = unit
        self._bar: Any = None
        self._tqdm = _bars() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else None
        self._quarter = 0
        self._begun = self._told = time.monotonic()

    def __call__(self, done: int, total: int = 0) -> None:
        self._total = total or self._total
        if self._tqdm is not None:
            if self._bar is None:
                self._bar = self._tqdm(desc=self._title, total=self._total or None, leave=False, **self._scale())
            self._bar.update(max(0, done - self._bar.n))
            return
        now = time.monotonic()
        quarter = done * QUARTERS // self._total if self._total else 0
        if quarter > self._quarter or (not self._total and now - self._told > LINE_EVERY_S):
            self._quarter, self._told = quarter, now
            self._tell(f"{self._title}: {self._shown(done)} after {now - self._begun:.0f} s")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def _scale(self) -> dict[str, Any]:
        if self._unit == "B":
            return {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
        return {"unit": f" {self._unit}"}

    def _shown(self, done: int) -> str:
        if self._unit == "B":
            of = f" of {self._total / 2**20:.0f}" if self._total else ""
            return f"{done / 2**20:.0f}{of} MiB"
        return f"{done:,}{f' of {self._total:,}' if self._total else ''} {self._unit}"

    def _tell(self, text: str) -> None:
        with suppress(OSError):  # nobody reads it
            print(logs.json_line("progress", text) if logs.is_json() else text, file=sys.stderr, flush=True)


def _bars() -> Any:
    """Returns tqdm's class; None where the package is not installed, as in a client alone."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm
