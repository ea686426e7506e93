"""Logits processors that add to logits: penalties on tokens that a request has seen, and biases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from allspan.worker.sampling.kernel import SamplingKernel
from allspan.worker.sampling.processor import DeviceChange, Logits, LogitsProcessor, SamplingRow

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

    needs_tokens = False

    def __init__(self, kernel: SamplingKernel, counts: TokenCounts, penalty: float, output_only: bool) -> None:
        self._kernel = kernel
        self._counts = counts
        self._penalty = penalty
        self._output_only = output_only

    @classmethod
    def of(cls, row: SamplingRow) -> RepetitionPenalty | None:
        """The row's, if it asks for one."""
        penalty, output_only = row.params.repetition_penalty, row.params.suppress_repetition_in_generation
        if penalty == 1.0:
            return None
        counts = TokenCounts(row.tokens, row.prompt_len if output_only else 0, row.vocab_size)
        return cls(row.kernel, counts, penalty, output_only)

    def apply(self, position: int, logits: Logits) -> None:
        ids, _ = self._counts.until(position)
        self._kernel.penalise_repeated(logits, ids, self._penalty)

    def on_device(self, change: DeviceChange) -> None:
        change.repetition, change.output_only = self._penalty, self._output_only


class PresenceAndFrequency:
    """Takes `presence` once, and `frequency` for each time, from the logits of tokens that were seen in the output."""

    needs_tokens = False

    def __init__(self, kernel: SamplingKernel, counts: TokenCounts, presence: float, frequency: float) -> None:
        self._kernel = kernel
        self._counts = counts
        self._presence = presence
        self._frequency = frequency

    @classmethod
    def of(cls, row: SamplingRow) -> PresenceAndFrequency | None:
        """The row's, if it asks for one of the two."""
        presence, frequency = row.params.presence_penalty, row.params.frequency_penalty
        if presence == frequency == 0.0:
            return None
        return cls(row.kernel, TokenCounts(row.tokens, row.prompt_len, row.vocab_size), presence, frequency)

    def apply(self, position: int, logits: Logits) -> None:
        ids, counts = self._counts.until(position)
        self._kernel.penalise_counted(logits, ids, counts, self._presence, self._frequency)

    def on_device(self, change: DeviceChange) -> None:
        change.presence, change.frequency = self._presence, self._frequency


class LogitBias:
    """Adds numbers to the logits of some tokens."""

    needs_tokens = False

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self._biases = biases

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids and biases, made when the host first needs them; a device does not."""
        ids, values = zip(*self._biases, strict=True)
        return np.array(ids), np.array(values, dtype=np.float32)

    @classmethod
    def of(cls, row: SamplingRow) -> LogitBias | None:
        """The row's, if it asks for any."""
        return cls(row.params.biases) if row.params.biases else None

    def apply(self, position: int, logits: Logits) -> None:
        ids, values = self._arrays
        logits[ids] += values

    def on_device(self, change: DeviceChange) -> None:
        change.biases = self._biases


PENALTIES: tuple[Callable[[SamplingRow], LogitsProcessor | None], ...] = (
    RepetitionPenalty.of,
    PresenceAndFrequency.of,
    LogitBias.of,
)
"""What makes a row's processors of this file, in their order."""
