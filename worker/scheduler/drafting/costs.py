"""StepCosts: what steps take by their tokens, and how many drafts pay for themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

GAIN = 1.03
"""Tokens a second are to rise at least so much, else nothing is drafted: estimates err."""
FAST, SLOW = 0.2, 0.1
"""How far the machine's speed, and the cost of drafts beside that of plain steps, move towards what a step took."""
TRIAL_STEPS, TRIAL_DRAFTS, TRIAL_CHANCE = 200, 7, 0.5
"""Drafts that seem too dear are run once in so many steps, so many of them, if the first is as likely at least."""
FADING = 0.998
"""What is left of the cost of drafts after a step without."""
_FARTHEST_STEP, _FARTHEST = 0.5, 2.0
"""Logarithms: what one step says at most, and how far drafts may cost otherwise than was measured."""
_FIRST = 4
"""The first steps with drafts count for more."""
_LEAST_S = 1e-6
_FEW = (1, 2, 4, 8)


class StepCosts:
    """The seconds of a step: those that were measured when the model was warmed up, times what the machine has needed
    of these lately, which others' work changes; for steps with drafts also times what these have taken beside plain
    ones."""

    def __init__(self, measured: Mapping[int, float], most_tokens: int) -> None:
        """`measured`: tokens of a step → its seconds, of one token at least. `most_tokens`: of a step."""
        self._measured = _interpolated(measured, most_tokens)
        self._speed = 0.0
        self._drafts: dict[int, float] = {}
        """What drafts cost more, by the tokens of a step in powers of two. A logarithm, as the speed is."""
        self._counts: dict[int, int] = {}
        """Steps with drafts so far, alike."""
        self._num_plain = 0
        """Steps since the last one with drafts."""
        self._has_seen_any = False

    def seconds(self, tokens: int, has_drafts: bool) -> float:
        """What a step of so many tokens is expected to take."""
        more = self._drafts.get(tokens.bit_length(), 0.0) if has_drafts else 0.0
        return self._measured[min(tokens, len(self._measured) - 1)] * math.exp(self._speed + more)

    def learn(self, tokens: int, has_drafts: bool, seconds: float) -> None:
        """A step without prompts has taken so long."""
        if seconds <= 0 or not 0 < tokens < len(self._measured):
            return
        self._num_plain = 0 if has_drafts else self._num_plain + 1
        error = math.log(seconds / self.seconds(tokens, has_drafts))
        if not self._has_seen_any:
            self._has_seen_any, self._speed = True, error
            return
        usual = min(max(error, -_FARTHEST_STEP), _FARTHEST_STEP)
        self._speed += FAST * usual
        if has_drafts:
            size = tokens.bit_length()
            self._counts[size] = count = self._counts.get(size, 0) + 1
            more = self._drafts.get(size, 0.0) + (error / (count + 1) if count <= _FIRST else SLOW * usual)
            self._drafts[size] = min(max(more, -_FARTHEST), _FARTHEST)
        else:  # so that drafts are tried again some time
            self._drafts = {size: FADING * more for size, more in self._drafts.items()}

    def saved(self, tokens: int, drafts: int, kept: int) -> float:
        """The seconds that drafts have saved in a step that has so many tokens without them, if so many were kept."""
        plain_s = self.seconds(tokens, False)
        return kept / tokens * plain_s - (self.seconds(tokens + drafts, True) - plain_s) if drafts else 0.0

    @property
    def is_trial_due(self) -> bool:
        """Whether drafts that seem too dear should be run soon, to see what they take now."""
        return self._num_plain >= TRIAL_STEPS

    def begin_trial(self) -> bool:
        """Whether such drafts should be run in this step. Where none are likely enough, that is asked again some steps
        later."""
        is_due = self.is_trial_due
        if is_due:
            self._num_plain -= TRIAL_STEPS // 10
        return is_due

    def can_gain(self, tokens: int, expected: float) -> bool:
        """Whether drafts would pay, were they certain to be kept, in a step of so many tokens that yields `expected`:
        a few of one request, or of all."""
        least, everyone = GAIN * expected / self.seconds(tokens, False), math.ceil(expected)
        counts = (*_FEW, *(everyone * few for few in _FEW))
        return expected > 0 and any((expected + n) / self.seconds(tokens + n, True) > least for n in counts)

    def most_useful(self, gains: Sequence[float], tokens: int, expected: float) -> int:
        """Returns how many drafts, from the first on, make tokens a second most; `gains`: what each adds to the
        `expected` tokens that come of the step as it is."""
        best, count = GAIN * expected / self.seconds(tokens, False), 0
        for i, gain in enumerate(gains, 1):
            expected += gain
            rate = expected / self.seconds(tokens + i, True)
            if rate > best:
                best, count = rate, i
        return count


def _interpolated(measured: Mapping[int, float], most_tokens: int) -> list[float]:
    """The seconds of steps of 0 to `most_tokens` tokens: never fewer than those of a shorter one, straight between
    what was measured, and beyond."""
    points = sorted(measured)
    seconds = [max(measured[point], _LEAST_S) for point in points]
    for i in range(len(points) - 1, 0, -1):  # what else the machine did has only made them longer
        seconds[i - 1] = min(seconds[i - 1], seconds[i])
    found: list[float] = []
    for tokens in range(most_tokens + 1):
        last = next((i for i, point in enumerate(points[1:-1], 1) if tokens <= point), len(points) - 1)
        if last == 0 or tokens <= points[0]:
            found.append(seconds[0])
            continue
        slope = (seconds[last] - seconds[last - 1]) / (points[last] - points[last - 1])
        found.append(seconds[last] + slope * (tokens - points[last]))
    return found
