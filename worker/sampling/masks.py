"""Tokens that must not be sampled: their logits become -inf."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Tokens = NDArray[np.int32]


class NoRepeatNgram:
    """Masks what would complete `size` tokens in a row that stand in the row's tokens already."""

    def __init__(self, tokens: Tokens, size: int) -> None:
        self._tokens = tokens
        self._size = size

    def __call__(self, position: int, logits: Logits) -> None:
        logits[self.ids(position)] = -math.inf

    def ids(self, position: int) -> Tokens:
        """What is masked there; some more than once."""
        known = self._tokens[:position]
        begun = self._size - 1  # tokens of an n-gram that are there before its last
        if position <= begun:
            return known[:0]
        starts = np.arange(position - begun)
        for i in range(begun):
            starts = starts[known[starts + i] == known[position - begun + i]]
            if not len(starts):
                break
        return known[starts + begun]


class MaskedSequences:
    """Masks the last token of each of `sequences` while the ones before it end the row's tokens, none of these before
    `first`."""

    def __init__(self, sequences: Sequence[Sequence[int]], tokens: Tokens, first: int = 0) -> None:
        self._tokens = tokens
        self._first = first
        self._always = np.array(sorted({ids[0] for ids in sequences if len(ids) == 1}), dtype=np.int64)
        # By the token before the last: few sequences need a closer look.
        self._after: dict[int, list[tuple[Tokens, int]]] = {}
        for ids in sequences:
            if len(ids) > 1:
                begun = np.array(ids[:-1], dtype=np.int32)
                self._after.setdefault(ids[-2], []).append((begun, ids[-1]))

    def __call__(self, position: int, logits: Logits) -> None:
        logits[self.ids(position)] = -math.inf

    def ids(self, position: int) -> NDArray[np.int64]:
        """What is masked there; some more than once."""
        if not self._after or position == 0:
            return self._always
        completed = []
        for begun, last in self._after.get(int(self._tokens[position - 1]), ()):
            start = position - len(begun)
            if start >= self._first and np.array_equal(self._tokens[start:position], begun):
                completed.append(last)
        return np.append(self._always, completed).astype(np.int64) if completed else self._always


class AllowedTokens:
    """Masks all others."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids)

    def __call__(self, position: int, logits: Logits) -> None:
        allowed = logits[self._ids]
        logits.fill(-math.inf)
        logits[self._ids] = allowed


class MinTokens:
    """Masks what would end the request at a position before `first_end`."""

    def __init__(self, ends: MaskedSequences, first_end: int) -> None:
        self._ends = ends
        self._first_end = first_end

    def __call__(self, position: int, logits: Logits) -> None:
        logits[self.ids(position)] = -math.inf

    def ids(self, position: int) -> NDArray[np.int64]:
        """What is masked there; some more than once."""
        return self._ends.ids(position) if position < self._first_end else np.zeros(0, dtype=np.int64)
