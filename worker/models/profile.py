"""What each op of a program takes, while somebody asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from allspan.protos.engine import OpProfile


@dataclass(slots=True)
class _Times:
    """Of one op, in nanoseconds."""

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
    """Runs functions and adds up their times by name. On a GPU it waits for each one's end, which slows the step."""

    def __init__(self, device: str) -> None:
        self._wait: Callable[[], None] | None = torch.cuda.synchronize if device.startswith("cuda") else None
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

    def results(self) -> tuple[OpProfile, ...]:
        """The longest total first. May be asked for while another thread runs ops."""
        times = dict(self._times)
        whole = sum(each.total for each in times.values()) or 1
        profiles = [
            OpProfile(
                op=name,
                count=each.count,
                min_ms=each.shortest / 1e6,
                max_ms=each.longest / 1e6,
                total_ms=each.total / 1e6,
                share=each.total / whole,
            )
            for name, each in times.items()
        ]
        return tuple(sorted(profiles, key=lambda profile: -profile.total_ms))
