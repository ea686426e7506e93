"""Says how far the weights are read: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

_LINES = 4


class LoadProgress:
    """Call it with (bytes done, bytes in all); use it as a context manager."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._bar: tqdm[None] | None = None
        self._is_terminal = sys.stderr.isatty()
        self._said = 0

    def __call__(self, done: int, total: int) -> None:
        if self._is_terminal:
            if self._bar is None:
                self._bar = tqdm(desc=self._title, total=total, unit="B", unit_scale=True, unit_divisor=1024)
            self._bar.update(done - self._bar.n)
            return
        quarter = done * _LINES // max(total, 1)
        if quarter > self._said:
            self._said = quarter
            print(f"{self._title}: {done / 2**20:.0f} of {total / 2**20:.0f} MiB", file=sys.stderr, flush=True)

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
