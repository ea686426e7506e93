"""Penalties on tokens that a request has seen, and how often it has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allspan.worker.sampling.kernel import SamplingKernel

Logits = NDArray[np.float32]

_FEW = 8


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
        """The distinct tokens before `position`, in no particular order, and of every token [vocabulary] how often it
        stands there. Valid until the next call."""
        if not len(self._counts):
            self._counts = np.zeros(self._vocab_size, dtype=np.int32)
            self._ids = np.empty(min(self._vocab_size, len(self._tokens)), dtype=np.int64)
        new = self._tokens[self._counted : position]
        self._counted = max(self._counted, position)
        if len(new) > _FEW:
            ids = np.unique(new)
            self._note(ids[self._counts[ids] == 0])
            self._counts += np.bincount(new, minlength=self._vocab_size).astype(np.int32)
        else:  # a decode's
            for token in new.tolist():
                if self._counts[token] == 0:
                    self._note(token)
                self._counts[token] += 1
        return self._ids[: self._num_ids], self._counts

    def _note(self, ids: NDArray[np.int64] | int) -> None:
        count = np.size(ids)
        self._ids[self._num_ids : self._num_ids + count] = ids
        self._num_ids += count


class RepetitionPenalty:
    """Divides the logits of tokens that were seen, or multiplies negative ones (Keskar et al., CTRL, 2019)."""

    def __init__(self, kernel: SamplingKernel, counts: TokenCounts, penalty: float) -> None:
        self._kernel = kernel
        self._counts = counts
        self._penalty = penalty

    def __call__(self, position: int, logits: Logits) -> None:
        ids, _ = self._counts.until(position)
        self._kernel.penalise_repeated(logits, ids, self._penalty)


class PresenceAndFrequency:
    """Takes `presence` once, and `frequency` for each time, from the logits of tokens that were seen."""

    def __init__(self, kernel: SamplingKernel, counts: TokenCounts, presence: float, frequency: float) -> None:
        self._kernel = kernel
        self._counts = counts
        self._presence = presence
        self._frequency = frequency

    def __call__(self, position: int, logits: Logits) -> None:
        ids, counts = self._counts.until(position)
        self._kernel.penalise_counted(logits, ids, counts, self._presence, self._frequency)
