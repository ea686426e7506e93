"""LookupBackoff: calls the drafters less often where their drafts save less than calling them takes."""

from __future__ import annotations

import math

from allspan.worker.scheduler.step_builder import StepBuilder

SKIP_AFTER, LONGEST_INTERVAL, TIME_SHARE = 16, 8, 0.005
"""After so many steps in a row without a draft at first, or where drafts do not pay, the drafters are called in one
step of so many at most, so that this takes such a share of a step. What they touch comes from memory each time: weights
have passed through the caches."""
_SMOOTHING = 0.1
"""The weight of the newest value in the moving averages."""
_FIRST = (1 - _SMOOTHING) ** -SKIP_AFTER
"""What a call is thought to save at first, in what it takes."""


class LookupBackoff:
    """Compares the time that calling the drafters takes with the time that their drafts have saved lately."""

    def __init__(self) -> None:
        self._num_skipped = 0
        self._interval = 1
        self._num_runs = 0
        self._seconds = 0.0
        """A moving average of what calling the drafters takes."""
        self._saved_s = 0.0
        """A moving average of what a call has saved."""

    def may_skip(self, step: StepBuilder) -> bool:
        """Returns whether the drafters are not called in this step."""
        count = len(step.runs)
        if count != self._num_runs or step.num_tokens > count:
            self._num_runs = count
            self.reset()
        if self._saved_s >= self._seconds:
            return False
        self._num_skipped += 1
        if self._num_skipped >= self._interval:
            self._num_skipped = 0
            return False
        return not any(request.grammar for request in step.requests)  # what a grammar forces comes at any time

    def reset(self) -> None:
        """The drafters are called in the next step, and some more."""
        self._saved_s = _FIRST * self._seconds

    def record(self, seconds: float, step_s: float) -> None:
        """Calling the drafters has taken so long, in steps that take `step_s`."""
        if self._seconds:
            self._seconds += _SMOOTHING * (seconds - self._seconds)
        else:
            self._seconds = seconds
            self.reset()
        self._interval = min(math.ceil(self._seconds / (TIME_SHARE * step_s)), LONGEST_INTERVAL)

    def learn(self, saved_s: float) -> None:
        """What the drafts of the last call have saved, which is less than nothing where too few were kept."""
        self._saved_s += _SMOOTHING * (saved_s - self._saved_s)
