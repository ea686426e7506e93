"""How busy the processors are that a thread may run on, as the kernel counts it in /proc/stat."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MEASURE_S = 0.5
"""Length of a measurement; the kernel counts in hundredths of a second."""
STALE_S = 2.0
"""Two readings that are further apart say nothing about the present load."""
LEAST_IDLE = 0.5
"""With less than this many processors idle on average, they are saturated: whatever runs beside the computing threads
takes from them."""

_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)  # "idle" and "iowait" of a line's numbers
_GUEST = 8  # "guest" and "guest_nice", which follow, are counted in "user" and "nice" already

Counts = tuple[float, float]
"""(idle ticks, all ticks), of all processors together."""


class ProcessorLoad:
    """Measures, while it is asked, whether the processors are saturated.

    `cpus`: the processors that count; empty: all that this process may run on.
    """

    def __init__(
        self,
        cpus: Sequence[int] = (),
        read: Callable[[Sequence[int]], Counts | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpus = tuple(sorted(cpus or os.sched_getaffinity(0)))
        self._read = read or read_counts
        self._clock = clock
        self._measured_at = -STALE_S
        self._counts: Counts | None = None
        self._is_saturated = False

    @property
    def saturated(self) -> int:
        """How many processors there are if the last measurement found them saturated; 0 if not, before the first
        measurement, and where the system does not say."""
        now = self._clock()
        elapsed = now - self._measured_at
        if elapsed >= MEASURE_S:
            before, self._counts, self._measured_at = self._counts, self._read(self._cpus), now
            if elapsed < STALE_S and before is not None and self._counts is not None:
                self._is_saturated = self._idle(before, self._counts) < LEAST_IDLE
        return len(self._cpus) if self._is_saturated else 0

    def _idle(self, before: Counts, after: Counts) -> float:
        """Number of processors that were idle on average."""
        ticks = after[1] - before[1]
        return len(self._cpus) * (after[0] - before[0]) / ticks if ticks > 0 else len(self._cpus)


def read_counts(cpus: Sequence[int]) -> Counts | None:
    """Ticks of these processors since the system's start; None where /proc/stat cannot be read."""
    try:
        lines = _STAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    names = {f"cpu{cpu}" for cpu in cpus}
    idle = total = 0.0
    for name, *numbers in map(str.split, lines):
        if name in names:
            ticks = [float(number) for number in numbers[:_GUEST]]
            idle += sum(ticks[_IDLE])
            total += sum(ticks)
    return idle, total
