"""The time of each op of a program, while it is profiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from allspan.protos.api.engine import OpProfile


@dataclass(slots=True)
class _Times:
    """The times of one op, in nanoseconds."""

    count: int = 0
    shortest: int = 0
    longest: int = 0
    total: int = 0

    def add(self, taken: int) -> None:
        self.shortest = min(self.shortest, taken) if self.count else taken
        self.longest = max(self.longest, taken)
        self.count += 1
        self.total += taken


class OpTimer:
    """Runs functions and adds up their times by name."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        """`synchronize` waits for a device's end of each one, which slows the step; None: it is over on return."""
        self._wait = synchronize
        self._times: dict[str, _Times] = {}

    def call(self, name: str, function: Callable[..., None], *arguments: object) -> None:
        if self._wait is not None:
            self._wait()
        started = time.perf_counter_ns()
        function(*arguments)
        if self._wait is not None:
            self._wait()
        taken = time.perf_counter_ns() - started
        times = self._times.get(name)
        if times is None:
            times = self._times[name] = _Times()
        times.add(taken)

    def rows(self) -> list[tuple[str, int, int, int, int]]:
        """(op, count, shortest, longest, total) in nanoseconds. May be asked for while another thread runs ops."""
        times = dict(self._times)
        return [(name, each.count, each.shortest, each.longest, each.total) for name, each in times.items()]


def profiles(rows: Iterable[tuple[str, int, int, int, int]]) -> tuple[OpProfile, ...]:
    """Returns a profile for each op and kernel of `rows` ("op" or "op kernel", count, shortest, longest, total) in
    nanoseconds, of which a name may have several; the longest total first."""
    merged: dict[str, tuple[int, int, int, int]] = {}
    for name, *times in rows:
        count, shortest, longest, total = times
        if name in merged:
            known = merged[name]
            count, total = count + known[0], total + known[3]
            shortest, longest = min(shortest, known[1]), max(longest, known[2])
        merged[name] = count, shortest, longest, total
    whole = sum(total for *_, total in merged.values()) or 1
    found = [
        OpProfile(
            op=name.partition(" ")[0],
            kernel=name.partition(" ")[2],
            count=count,
            min_ms=shortest / 1e6,
            max_ms=longest / 1e6,
            total_ms=total / 1e6,
            share=total / whole,
        )
        for name, (count, shortest, longest, total) in merged.items()
    ]
    return tuple(sorted(found, key=lambda profile: -profile.total_ms))


def summed(found: Iterable[OpProfile]) -> tuple[OpProfile, ...]:
    """Returns the profiles of several programs as those of one."""
    return profiles(
        (f"{op.op} {op.kernel}".rstrip(), op.count, _ns(op.min_ms), _ns(op.max_ms), _ns(op.total_ms)) for op in found
    )


def _ns(ms: float) -> int:
    return round(1e6 * ms)
