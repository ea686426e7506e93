"""TokenIndex: finds where the last tokens of a text occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SHORTEST = 2
"""Tokens that must occur again at least."""
MOST_PLACES = 12
"""Places that are looked at, the latest first."""
_MOST_STEPS = 4 * MOST_PLACES
"""The most places of a chain that are passed, where two other tokens may stand."""
_FIRST_SIZE = 256
_FACTOR = 40_503


class Found(NamedTuple):
    """The place where the longest end of a context occurs."""

    place: int
    """The token that follows there."""
    length: int
    """Tokens that are equal."""
    agreement: int
    """0: it is the only place; 1: the next longest is followed by the same token; 2: by another one."""


class TokenIndex:
    """Chains of the places where the same two tokens stand, as LZ77 compressors have them (DEFLATE, RFC 1951, section
    4). Numbers lie in arrays: 12 to 24 bytes a token."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._before = array("i")
        """For each place the one before in its chain; -1: none."""
        self._heads = array("i", [-1]) * _FIRST_SIZE
        """The latest place of each chain."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """The memory of its arrays."""
        return 4 * (len(self.tokens) + len(self._before) + len(self._heads))

    def extend(self, tokens: Iterable[int]) -> None:
        """More of the text."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        if len(self.tokens) > len(self._heads):
            size = len(self._heads)
            while size < len(self.tokens):
                size *= 4
            self._heads, self._before, first = array("i", [-1]) * size, array("i"), 0
        heads, befores, mask = self._heads, self._before, len(self._heads) - 1
        last = self.tokens[first - 1] if first else 0
        for place in range(first, len(self.tokens)):
            token = self.tokens[place]
            chain = (last * _FACTOR + token) & mask
            befores.append(heads[chain])
            heads[chain] = place
            last = token

    def find(self, context: Sequence[int], longest: int) -> Found | None:
        """Where the longest end of `context` occurs with a token behind it: of at least SHORTEST and at most `longest`
        tokens, of equally long ones the latest. Looks at no more than MOST_PLACES places."""
        if len(context) < SHORTEST:
            return None
        tokens, befores = self.tokens, self._before
        last, most = context[-1], min(longest, len(context))
        place = self._heads[(context[-2] * _FACTOR + last) & (len(self._heads) - 1)]
        best, length, second, looked = -1, SHORTEST - 1, -1, 0
        for _ in range(_MOST_STEPS):
            if place < SHORTEST - 1 or looked == MOST_PLACES:
                break
            if tokens[place] == last and tokens[place - 1] == context[-2] and place + 1 < len(tokens):
                looked += 1
                count, most_here = 1, min(most, place + 1)
                while count < most_here and tokens[place - count] == context[-1 - count]:
                    count += 1
                if count > length:
                    best, length, second = place, count, best
                    if count == longest:
                        break
                elif second < 0:
                    second = place
            place = befores[place]
        if best < 0:
            return None
        agreement = 0 if second < 0 else 1 if tokens[second + 1] == tokens[best + 1] else 2
        return Found(best + 1, length, agreement)
