"""BigramDrafter: proposes, in the output of a grammar, what followed the last token when it came before."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.worker.scheduler.drafting.drafter import Draft
from allspan.worker.scheduler.request import Request

_CHANCES = (0.25, 0.5, 0.65, 0.75, 0.85)
"""The chance of each kind: first where another token followed the time before, then by how often the same one did."""


class BigramDrafter:
    """Structured text has much that stands between its values: white space, quotes and brackets, which a grammar does
    not force, and before which other tokens stand each time. One draft at a time, so that others go on behind it."""

    def __init__(self) -> None:
        self._texts: dict[bytes, _Bigrams] = {}

    def propose(self, request: Request, before: Sequence[int], most: int) -> Sequence[Draft]:
        if request.grammar is None or most < 1:
            return ()
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = _Bigrams()
        text.read(request.output_token_ids)
        last = before[-1] if before else text.last
        found = text.following.get(last)
        return () if found is None else (Draft(found[0], min(found[1], len(_CHANCES) - 1)),)

    def chance(self, kind: int) -> float:
        return _CHANCES[kind]

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)


class _Bigrams:
    """What followed each token of an output last."""

    def __init__(self) -> None:
        self.last = -1
        self.following: dict[int, tuple[int, int]] = {}
        """Token → the one that followed it, and how often in a row it has; 0: once, and another one before it."""
        self._count = 0

    def read(self, output: Sequence[int]) -> None:
        """Takes in what is new of the output."""
        for token in output[self._count :]:
            known, times = self.following.get(self.last, (token, 0))
            self.following[self.last] = token, times + 1 if token == known else 0
            self.last = token
        self._count = len(output)
