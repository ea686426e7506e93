"""Penalties on tokens that a request has seen, and how often it has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]

_MOST = float(np.finfo(np.float32).max)


class TokenCounts:
    """How often each token stands in a row's buffer from `start` on. Made when first asked, then only caught up."""

    def __init__(self, tokens: NDArray[np.int32], start: int, vocab_size: int) -> None:
        self._tokens = tokens
        self._counted = start
        self._vocab_size = vocab_size
        self._counts = np.zeros(0, dtype=np.int32)
        self._ids = np.zeros(0, dtype=np.int64)
        self._num_ids = 0

    def until(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The distinct tokens before `position`, in no particular order, and how often each stands there."""
        if not len(self._counts):
            self._counts = np.zeros(self._vocab_size, dtype=np.int32)
            self._ids = np.empty(min(self._vocab_size, len(self._tokens)), dtype=np.int64)
        if position > self._counted:
            ids, counts = np.unique(self._tokens[self._counted : position], return_counts=True)
            fresh = ids[self._counts[ids] == 0]
            self._counts[ids] += counts.astype(np.int32)
            self._ids[self._num_ids : self._num_ids + len(fresh)] = fresh
            self._num_ids += len(fresh)
            self._counted = position
        known = self._ids[: self._num_ids]
        return known, self._counts[known]


class RepetitionPenalty:
    """Divides the logits of tokens that were seen, or multiplies negative ones (Keskar et al., CTRL, 2019)."""

    def __init__(self, counts: TokenCounts, penalty: float) -> None:
        self._counts = counts
        self._penalty = penalty

    def __call__(self, position: int, logits: Logits) -> None:
        ids, _ = self._counts.until(position)
        values = logits[ids].astype(np.float64)
        with np.errstate(over="ignore"):  # a penalty near 0
            values = np.where(values < 0, values * self._penalty, values / self._penalty)
        logits[ids] = np.minimum(values, _MOST)


class PresenceAndFrequency:
    """Takes `presence` once, and `frequency` for each time, from the logits of tokens that were seen."""

    def __init__(self, counts: TokenCounts, presence: float, frequency: float) -> None:
        self._counts = counts
        self._presence = np.float32(presence)
        self._frequency = np.float32(frequency)

    def __call__(self, position: int, logits: Logits) -> None:
        ids, counts = self._counts.until(position)
        logits[ids] -= self._presence + self._frequency * counts.astype(np.float32)
