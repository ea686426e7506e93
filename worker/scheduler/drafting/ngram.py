"""NgramDrafter: proposes what followed the first occurrence of the last tokens (Saxena, Prompt Lookup Decoding, 2023),
with the settings of vLLM's method "ngram"."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.protos.config.speculation import Speculation
from allspan.worker.scheduler.drafting.drafter import Draft, context
from allspan.worker.scheduler.request import Request


class NgramDrafter:
    """Looks for the longest of the last `prompt_lookup_max` to `prompt_lookup_min` tokens, in the request alone."""

    def __init__(self, asked: Speculation) -> None:
        self._least, self._most = asked.prompt_lookup_min, asked.prompt_lookup_max
        self._places: dict[bytes, _Places] = {}

    def propose(self, request: Request, before: Sequence[int], most: int) -> Sequence[Draft]:
        places = self._places.get(request.request_id)
        if places is None:
            places = self._places[request.request_id] = _Places(self._least)
        places.catch_up(request)
        last = context(request, before, self._most)
        start, length = places.find(request, last)
        return [Draft(token, length) for token in request.tokens(start, start + most)] if length else ()

    def chance(self, kind: int) -> float:
        return 1 - 0.8 / max(kind, 1)

    def forget(self, request: Request) -> None:
        self._places.pop(request.request_id, None)


class _Places:
    """The places of each run of `size` tokens of a request, the first ones first."""

    _MOST = 32
    """Places of equal tokens that are kept, which bounds the work of a look-up."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._count = 0
        """Tokens that have been taken in."""

    def catch_up(self, request: Request) -> None:
        size, first = self._size, max(self._count, self._size)
        if request.num_tokens <= self._count:
            return
        tokens = request.tokens(first - size, request.num_tokens)
        for end in range(size, len(tokens) + 1):
            if end + first - size > self._count:
                places = self._ends.setdefault(tokens[end - size : end], [])
                if len(places) < self._MOST:
                    places.append(end + first - size)
        self._count = request.num_tokens

    def find(self, request: Request, last: list[int]) -> tuple[int, int]:
        """Where what followed the longest end of `last` begins, and how long that is; (0, 0) where there is none."""
        best, length = 0, 0
        for end in self._ends.get(tuple(last[-self._size :]), ()) if len(last) >= self._size else ():
            if end >= request.num_tokens:
                continue
            earlier = request.tokens(max(0, end - len(last)), end)
            count = self._size
            while count < len(earlier) and earlier[-1 - count] == last[-1 - count]:
                count += 1
            if count > length:
                best, length = end, count
        return best, length
