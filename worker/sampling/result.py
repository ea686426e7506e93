"""What is wanted of a step's rows of logits, and what sampling makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.results import TokenLogprob
from allspan.protos.api.sampling import SamplingParams

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step made of its m rows of logits."""

    tokens: NDArray[np.int32]
    """[m]: the token sampled, or where it was known, that one; negative where there is none (see `failure`)."""
    logprobs: dict[int, tuple[TokenLogprob, ...]]
    """Log-probabilities of the sampled tokens of those rows that asked."""
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    """Log-probabilities of the known tokens of each row, in the order of their logits."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of some rows of logits. All arrays are int64 [m]."""

    rows: Rows
    positions: Rows
    targets: Rows
    """The token where it is known; -1 where it is to be sampled."""
    counts: Rows
    """How many of the most likely tokens get log-probabilities, beside the chosen one; -1: not even that one."""

    def share(self, rank: int, size: int) -> Wanted:
        """Returns what one rank of several samples: every `size`-th row of logits."""
        parts = (self.rows, self.positions, self.targets, self.counts)
        return Wanted(*(np.ascontiguousarray(part[rank::size]) for part in parts))

    @property
    def columns(self) -> int:
        """The width of the result: the token; then, if any row asked, its log-probability, the most likely ids and
        theirs (floats as their bits)."""
        most = int(self.counts.max(initial=-1))
        return 1 if most < 0 else 2 + 2 * most


class LogprobCounts:
    """How many log-probabilities each row asked for, of its output and of its prompt."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._output = np.full(max_rows, -1, dtype=np.int64)
        self._prompt = np.zeros(max_rows, dtype=np.int64)

    def add(self, row: int, params: SamplingParams) -> None:
        """A request takes the row."""
        self._output[row] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._prompt[row] = min(params.prompt_logprobs or 0, self._vocab_size)

    def wanted(self, rows: Rows, positions: Rows, targets: Rows | None) -> Wanted:
        """Returns what a step wants of its rows of logits; `targets` None: every token is to be sampled."""
        counts = self._output[rows]
        if targets is None:
            return Wanted(rows, positions, np.full(len(rows), -1, dtype=np.int64), counts)
        return Wanted(rows, positions, targets, np.where(targets < 0, counts, self._prompt[rows]))


def pack(sampled: Sampled, wanted: Wanted) -> NDArray[np.int32]:
    """Returns what `unpack` makes `sampled` of: int32 [m, wanted.columns]."""
    result = np.zeros((len(wanted.rows), wanted.columns), dtype=np.int32)
    result[:, 0] = sampled.tokens
    if result.shape[1] == 1:
        return result
    most, floats = (result.shape[1] - 2) // 2, result.view(np.float32)
    entries = {
        known: {row: iter(found) for row, found in of_rows.items()}
        for known, of_rows in ((False, sampled.logprobs), (True, sampled.prompt_logprobs))
    }
    for i in np.flatnonzero(wanted.counts >= 0).tolist():
        entry = next(entries[bool(wanted.targets[i] >= 0)][int(wanted.rows[i])])
        count = len(entry.top)
        floats[i, 1] = entry.logprob
        result[i, 2 : 2 + count] = [token for token, _ in entry.top]
        floats[i, 2 + most : 2 + most + count] = [logprob for _, logprob in entry.top]
    return result


def unpack(result: NDArray[np.int32], wanted: Wanted) -> Sampled:
    """Returns the tokens and log-probabilities of a sampling kernel's result, int32 [m, wanted.columns]."""
    tokens = result[:, 0]
    if result.shape[1] == 1:
        return Sampled(tokens, {})
    most = (result.shape[1] - 2) // 2
    floats = result.view(np.float32)
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    prompt: dict[int, list[TokenLogprob]] = {}
    for i in np.flatnonzero(wanted.counts >= 0).tolist():
        row, count = int(wanted.rows[i]), int(wanted.counts[i])
        ids = result[i, 2 : 2 + count].tolist()
        top = floats[i, 2 + most : 2 + most + count].tolist()
        entry = TokenLogprob(float(floats[i, 1]), tuple(zip(ids, top, strict=True)))
        if wanted.targets[i] < 0:
            logprobs[row] = (*logprobs.get(row, ()), entry)
        else:
            prompt.setdefault(row, []).append(entry)
    return Sampled(tokens, logprobs, {row: tuple(entries) for row, entries in prompt.items()})
