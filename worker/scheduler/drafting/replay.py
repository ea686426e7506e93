"""ReplayDrafter: proposes a known answer, some of its tokens wrong, so that a benchmark chooses how many drafts are
kept."""

from __future__ import annotations

import random
from collections.abc import Sequence

from allspan.protos.config.speculation import Speculation
from allspan.worker.scheduler.drafting.drafter import Draft
from allspan.worker.scheduler.request import Request

MOST_ANSWERS = 1024
"""The answers that are kept; the oldest are forgotten first."""


class ReplayDrafter:
    """Keeps the longest answer that each prompt got, whoever asked and with whatever salt: for benchmarks alone. Each
    draft is right by the chosen chance, whatever the others are."""

    def __init__(self, asked: Speculation) -> None:
        self._rate = asked.replay_rate
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._random = random.Random(0)

    def propose(self, request: Request, before: Sequence[int], most: int) -> Sequence[Draft]:
        at = len(request.output_token_ids) + len(before)
        answer = self._answers.get(tuple(request.prompt_token_ids), ())[at : at + most]
        return [Draft(token if self._random.random() < self._rate else _other(token)) for token in answer]

    def chance(self, kind: int) -> float:
        return min(self._rate, 0.99)

    def forget(self, request: Request) -> None:
        prompt, output = tuple(request.prompt_token_ids), tuple(request.output_token_ids)
        if len(output) > len(self._answers.get(prompt, ())):
            self._answers[prompt] = output
        if len(self._answers) > MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]


def _other(token: int) -> int:
    return token - 1 if token else 1
