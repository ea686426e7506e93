"""Looks: how often drafts are looked for where none are found."""

from __future__ import annotations

import math

from allspan.worker.scheduler.drafting.costs import StepCosts
from allspan.worker.scheduler.step_builder import StepBuilder

REST_AFTER, MOST_REST, LOOK_SHARE = 16, 4, 0.005
"""After so many steps in a row without a draft, drafts are looked for in one step of so many at most, so that it takes
this share of the time. What it touches comes from memory each time: weights have passed through the caches since."""
_LOOK_MOVES = 0.1
"""How far the time of looking moves towards what it took."""


class Looks:
    """Counts the steps in which drafts were looked for in vain."""

    def __init__(self) -> None:
        self._num_vain = 0
        """Steps in a row that had no drafts, of equally many decodes."""
        self._num_runs = 0
        self._seconds = 0.0
        """The seconds that a look has taken lately."""

    def may_rest(self, step: StepBuilder, costs: StepCosts) -> bool:
        """Whether drafts need not be looked for in this step."""
        count = len(step.runs)
        is_same = count == self._num_runs and all(run.num_tokens == 1 for run in step.runs)
        self._num_runs, self._num_vain = count, self._num_vain + 1 if is_same else 0
        if self._num_vain <= REST_AFTER:
            return False
        every = min(math.ceil(self._seconds / (LOOK_SHARE * costs.seconds(count, False))), MOST_REST)
        if every <= 1 or self._num_vain % every == 0:
            return False
        return not any(request.grammar for request in step.requests)  # what a grammar forces comes at any time

    def found(self) -> None:
        """Drafts will be looked for in the next step, as there are some."""
        self._num_vain = 0

    def looked(self, seconds: float, was_vain: bool) -> None:
        """A look has taken so long."""
        self._num_vain = self._num_vain if was_vain else 0
        self._seconds += _LOOK_MOVES * (seconds - self._seconds)
