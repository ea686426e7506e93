"""Acceptance: estimates how likely a draft is kept, given that those before it are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from allspan.worker.scheduler.drafting.drafter import Draft, Drafter
from allspan.worker.scheduler.request import Request

SLOW, FAST = 0.03, 0.4
"""How far an estimate moves towards what was seen: that of a drafter's kind, for all requests, and that of a drafter
for one request."""
_FARTHEST = 4.0
HARDLY_EVER = 0.02
"""The chance of a run of drafts that is too little for any step."""


class Proposed(NamedTuple):
    """A draft, and whose it is."""

    draft: Draft
    drafter: int


class Acceptance:
    """A logistic model with a number for each kind of draft and one for each drafter in each request, both learnt from
    every draft whose turn comes, run or not: what was sampled in its place is known either way."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self._kinds: dict[tuple[int, int], float] = {}
        self._requests: dict[bytes, list[float]] = {}

    def chances(self, request: Request, proposed: Iterable[Proposed]) -> list[float]:
        """The chance of each draft, those before it being kept; of the first ones alone where all of them together
        are kept hardly ever."""
        own = self._requests.get(request.request_id) or [0.0] * len(self._drafters)
        chances, all_kept = [], 1.0
        for each in proposed:
            chances.append(1 / (1 + math.exp(-self._of(each) - own[each.drafter])))
            all_kept *= chances[-1]
            if all_kept < HARDLY_EVER:
                break
        return chances

    def learn(self, request: Request, proposed: Sequence[Proposed], tokens: Sequence[int]) -> None:
        """What came in the place of these drafts. Those behind the first that was wrong say nothing."""
        own = self._requests.setdefault(request.request_id, [0.0] * len(self._drafters))
        for each, token in zip(proposed, tokens, strict=False):
            is_right = each.draft.token == token
            kind = self._of(each)
            error = is_right - 1 / (1 + math.exp(-kind - own[each.drafter]))
            self._kinds[each.drafter, each.draft.kind] = kind + SLOW * error
            own[each.drafter] = min(max(own[each.drafter] + FAST * error, -_FARTHEST), _FARTHEST)
            if not is_right:
                return

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._requests.pop(request.request_id, None)

    def _of(self, proposed: Proposed) -> float:
        kind = self._kinds.get((proposed.drafter, proposed.draft.kind))
        if kind is None:
            chance = self._drafters[proposed.drafter].chance(proposed.draft.kind)
            kind = math.log(chance / (1 - chance))
        return kind
