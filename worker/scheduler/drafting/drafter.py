"""Drafter: proposes what follows a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from allspan.worker.scheduler.request import Request


class Draft(NamedTuple):
    """A token that is proposed."""

    token: int
    kind: int = 0
    """What speaks for it, as a number of the drafter's own: drafts of a kind are kept about equally often."""


class Drafter(Protocol):
    """Runs on the leader alone. Whatever it proposes, no request's tokens change."""

    def propose(self, request: Request, before: Sequence[int], most: int) -> Sequence[Draft]:
        """What follows the request's tokens and `before`, which other drafters proposed: up to `most` drafts. More are
        cut off, and so is what follows an id that the model does not have."""

    def chance(self, kind: int) -> float:
        """The share of drafts of a kind that are kept, given that those before them are: a guess to begin with."""

    def forget(self, request: Request) -> None:
        """The request has ended. Also called for requests that it has never seen."""


LONGEST_CONTEXT = 64
"""Tokens that a drafter looks back at."""


def context(request: Request, before: Sequence[int], most: int = LONGEST_CONTEXT) -> list[int]:
    """The last tokens of the request and those that were proposed behind them, at most `most`."""
    count = request.num_tokens
    return [*request.tokens(max(0, count - most + len(before)), count), *before][-most:]
