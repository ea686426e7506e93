"""LookupBackoff: skips the search for drafts in some steps, where it has found none for a while."""

from __future__ import annotations

import math

from allspan.worker.scheduler.drafting.costs import StepCosts
from allspan.worker.scheduler.step_builder import StepBuilder

SKIP_AFTER, LONGEST_INTERVAL, TIME_SHARE = 16, 4, 0.005
"""After so many steps in a row without a draft, the drafters are called in one step of so many at most, so that this
takes such a share of a step. What they touch comes from memory each time: weights have passed through the caches."""
_SMOOTHING = 0.1
"""The weight of the newest time in the moving average."""


class LookupBackoff:
    """Counts the steps in a row that had no drafts."""

    def __init__(self) -> None:
        self._num_vain = 0
        """Steps in a row that had no drafts, of equally many decodes."""
        self._num_runs = 0
        self._seconds = 0.0
        """A moving average of what calling the drafters takes."""

    def may_skip(self, step: StepBuilder, costs: StepCosts) -> bool:
        """Returns whether the drafters are not called in this step."""
        count = len(step.runs)
        is_same = count == self._num_runs and all(run.num_tokens == 1 for run in step.runs)
        self._num_runs, self._num_vain = count, self._num_vain + 1 if is_same else 0
        if self._num_vain <= SKIP_AFTER:
            return False
        every = min(math.ceil(self._seconds / (TIME_SHARE * costs.seconds(count, False))), LONGEST_INTERVAL)
        if every <= 1 or self._num_vain % every == 0:
            return False
        return not any(request.grammar for request in step.requests)  # what a grammar forces comes at any time

    def reset(self) -> None:
        """The drafters are called in the next step."""
        self._num_vain = 0

    def record(self, seconds: float, was_vain: bool) -> None:
        """Calling the drafters has taken so long; `was_vain`: without a draft that is run."""
        self._num_vain = self._num_vain if was_vain else 0
        self._seconds += _SMOOTHING * (seconds - self._seconds)
