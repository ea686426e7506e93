"""Logits processors that forbid tokens: their logits become -inf."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.sampling import SamplingParams
from allspan.worker.sampling.processor import DeviceChange, Logits, LogitsProcessor, SamplingRow, TokenMask

Tokens = NDArray[np.int32]


class NoRepeatNgram(TokenMask):
    """Masks what would complete `size` tokens in a row that stand in the row's tokens already."""

    def __init__(self, tokens: Tokens, size: int) -> None:
        self._tokens = tokens
        self._size = size

    @classmethod
    def of(cls, row: SamplingRow) -> NoRepeatNgram | None:
        """The row's, if it asks for one."""
        size = row.params.no_repeat_ngram_size
        return cls(row.tokens, size) if size else None

    @property
    def needs_tokens(self) -> bool:
        return True

    def ids(self, position: int) -> Tokens:
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


class MaskedSequences(TokenMask):
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

    @classmethod
    def bad_words(cls, row: SamplingRow) -> MaskedSequences | None:
        """The row's `bad_words_ids`, if it has any."""
        sequences = row.params.bad_words_ids
        return cls(sequences, row.tokens) if sequences else None

    @property
    def needs_tokens(self) -> bool:
        return bool(self._after)

    def ids(self, position: int) -> NDArray[np.int64]:
        if not self._after or position == 0:
            return self._always
        completed = []
        for begun, last in self._after.get(int(self._tokens[position - 1]), ()):
            start = position - len(begun)
            if start >= self._first and np.array_equal(self._tokens[start:position], begun):
                completed.append(last)
        return np.append(self._always, completed).astype(np.int64) if completed else self._always


class AllowedTokens:
    """Masks all tokens but some."""

    needs_tokens = False

    def __init__(self, ids: Sequence[int]) -> None:
        self._allowed = ids

    @cached_property
    def _ids(self) -> NDArray[np.int64]:
        """Made when the host first needs them; a device does not."""
        return np.array(self._allowed)

    @classmethod
    def of(cls, row: SamplingRow) -> AllowedTokens | None:
        """The row's, if it names any."""
        ids = row.params.allowed_token_ids
        return cls(ids) if ids else None

    def apply(self, position: int, logits: Logits) -> None:
        allowed = logits[self._ids]
        logits.fill(-math.inf)
        logits[self._ids] = allowed

    def on_device(self, change: DeviceChange) -> None:
        change.allowed = self._allowed


class MinTokens(TokenMask):
    """Masks what would end the request at a position before `first_end`."""

    def __init__(self, ends: MaskedSequences, first_end: int) -> None:
        self._ends = ends
        self._first_end = first_end

    @classmethod
    def of(cls, row: SamplingRow) -> MinTokens | None:
        """The row's, if it has a least length and anything that could end it before."""
        params = row.params
        ends = ends_of(params, row.eos_token_ids, row.vocab_size)
        sequences = (*((end,) for end in sorted(ends)), *params.stop_words_ids)
        if not params.min_tokens or not sequences:
            return None
        return cls(MaskedSequences(sequences, row.tokens, row.prompt_len), row.prompt_len + params.min_tokens)

    @property
    def needs_tokens(self) -> bool:
        return self._ends.needs_tokens

    def ids(self, position: int) -> NDArray[np.int64]:
        return self._ends.ids(position) if position < self._first_end else np.zeros(0, dtype=np.int64)


MASKS: tuple[Callable[[SamplingRow], LogitsProcessor | None], ...] = (
    NoRepeatNgram.of,
    MaskedSequences.bad_words,
    AllowedTokens.of,
    MinTokens.of,
)
"""What makes a row's processors of this file, in their order."""


def ends_of(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> set[int]:
    """The token ids that end an output when they are sampled."""
    ends = set(params.stop_token_ids)
    if not params.ignore_eos:
        ends.update(token_id for token_id in eos_token_ids if token_id < vocab_size)
    return ends
