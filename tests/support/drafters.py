"""Drafters of tests: they say token ids, and are asked everything else in vain."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.protos.config.speculation import Speculation
from allspan.worker.scheduler.drafting.drafter import Draft
from allspan.worker.scheduler.drafting.drafting import Drafting
from allspan.worker.scheduler.request import Request


class Guesses:
    """Meets `Drafter`; `guess` says what it proposes."""

    def guess(self, request: Request, most: int) -> Sequence[int]:
        raise NotImplementedError

    def propose(self, request: Request, before: Sequence[int], most: int) -> Sequence[Draft]:
        return list(map(Draft, self.guess(request, most)))

    def chance(self, kind: int) -> float:
        return 0.5

    def forget(self, request: Request) -> None:
        pass


def drafting(drafter: Guesses, most: int, vocab_size: int) -> Drafting:
    """Drafting that runs whatever is proposed."""
    return Drafting(Speculation("toy", most), (drafter,), vocab_size)
