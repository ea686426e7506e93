"""RankDrafts: hands on what a model in the ranks has drafted behind the last step."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.worker.scheduler.drafting.drafter import Draft
from allspan.worker.scheduler.request import Request
from allspan.worker.step.rank_drafter import Drafted

_DEEPEST = 15
"""Drafts behind so many others are of one kind."""
_CHANCE = 0.7


class RankDrafts:
    """Has drafts of running requests for as long as their tokens are those that the drafts were made for. The kind of a
    draft is the number of those before it."""

    def __init__(self) -> None:
        self._made: dict[bytes, Drafted] = {}
        self._refused: set[bytes] = set()
        """Requests with tokens that the drafter cannot take in."""

    def take(self, request: Request, drafted: Drafted, first: int) -> None:
        """What was drafted for the request, of which the drafter had taken in `first` tokens before."""
        if drafted.num_tokens <= first:
            self._refused.add(request.request_id)
        self._made[request.request_id] = drafted

    def refuses(self, request: Request) -> bool:
        """Whether the drafter cannot take in the request's tokens."""
        return request.request_id in self._refused

    def propose(self, request: Request, before: Sequence[int], most: int) -> Sequence[Draft]:
        made, count = self._made.get(request.request_id), len(before)
        if made is None or made.num_tokens != request.num_tokens or made.drafts[:count] != tuple(before):
            return ()
        return [Draft(token, kind_of(count + i)) for i, token in enumerate(made.drafts[count : count + most])]

    def chance(self, kind: int) -> float:
        return _CHANCE

    def forget(self, request: Request) -> None:
        self._made.pop(request.request_id, None)
        self._refused.discard(request.request_id)


def kind_of(depth: int) -> int:
    """The kind of a draft behind `depth` others."""
    return min(depth, _DEEPEST)
