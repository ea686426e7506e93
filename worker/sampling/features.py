"""What a request may ask of the sampler, one class each, applied to one row of logits at a time.

`add(row, params, prompt_len)` and `remove(row)` keep a feature's state for the rows of the batch. Then either
`apply(row, position, logits)` changes the row's logits in place, or `threshold(row, logits)` says below which logit
tokens are left out (None: nothing asked, nothing computed). Order: min_tokens, temperature, top-k, top-p, min-p; each
filter sees what the one before it has left.

Filters are thresholds, so tokens of equal logits stay or go together, and no outcome depends on how a sort breaks ties.
Each row is worked on alone, so none depends on the other rows either.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from allspan.protos.sampling import SamplingParams

Logits = NDArray[np.float32]


class Change(Protocol):
    """Changes logits [vocabulary] of a row that is about to get the token at `position` of its request."""

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None: ...

    def remove(self, row: int) -> None: ...

    def apply(self, row: int, position: int, logits: Logits) -> None: ...


class Filter(Protocol):
    """Leaves out tokens of a row whose logits lie below a threshold."""

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None: ...

    def remove(self, row: int) -> None: ...

    def threshold(self, row: int, logits: Logits) -> float | None: ...


class MinTokens:
    """Masks the ids that would end the request until it has `min_tokens` output tokens."""

    def __init__(self, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._eos = {token_id for token_id in eos_token_ids if token_id < vocab_size}
        self._masks: dict[int, tuple[int, NDArray[np.int64]]] = {}

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        ids = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos)
        if params.min_tokens > 0 and ids:
            self._masks[row] = (prompt_len + params.min_tokens, np.array(sorted(ids)))

    def remove(self, row: int) -> None:
        self._masks.pop(row, None)

    @property
    def rows(self) -> set[int]:
        """Those that may need `apply`."""
        return set(self._masks)

    def apply(self, row: int, position: int, logits: Logits) -> None:
        if row in self._masks:
            first, ids = self._masks[row]
            if position < first:
                logits[ids] = -math.inf


class Temperature:
    """Divides the logits. Greedy rows never come here."""

    def __init__(self) -> None:
        self._divisors: dict[int, np.float32] = {}

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        if params.temperature != 1.0 and not params.is_greedy:
            self._divisors[row] = np.float32(params.temperature)

    def remove(self, row: int) -> None:
        self._divisors.pop(row, None)

    def apply(self, row: int, position: int, logits: Logits) -> None:
        if row in self._divisors:
            logits /= self._divisors[row]


class TopK:
    """Keeps the k largest logits, and those equal to the k-th."""

    def __init__(self) -> None:
        self._ks: dict[int, int] = {}

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        if params.top_k > 0:
            self._ks[row] = params.top_k

    def remove(self, row: int) -> None:
        self._ks.pop(row, None)

    def threshold(self, row: int, logits: Logits) -> float | None:
        k = self._ks.get(row)
        return None if k is None or k >= len(logits) else kth_largest(logits, k)


class TopP:
    """Keeps the most likely tokens whose probabilities reach p: each one before which less than p has been gathered."""

    def __init__(self) -> None:
        self._ps: dict[int, float] = {}

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        if params.top_p < 1.0:
            self._ps[row] = params.top_p

    def remove(self, row: int) -> None:
        self._ps.pop(row, None)

    def threshold(self, row: int, logits: Logits) -> float | None:
        p = self._ps.get(row)
        if p is None:
            return None
        best = -np.sort(-logits)
        gathered = np.cumsum(weights(best))
        return float(best[np.searchsorted(gathered, p * gathered[-1])])


class MinP:
    """Keeps tokens at least `min_p` times as likely as the most likely one."""

    def __init__(self) -> None:
        self._distances: dict[int, float] = {}

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        if params.min_p > 0.0:
            self._distances[row] = math.log(params.min_p)

    def remove(self, row: int) -> None:
        self._distances.pop(row, None)

    def threshold(self, row: int, logits: Logits) -> float | None:
        distance = self._distances.get(row)
        return None if distance is None else float(logits.max()) + distance


def kth_largest(logits: Logits, k: int) -> float:
    """1 <= k <= len(logits)."""
    return float(np.partition(logits, len(logits) - k)[len(logits) - k])


def weights(logits: Logits) -> NDArray[np.float64]:
    """exp(logit - the largest): probabilities but for one factor, to be added up in float64."""
    exponentials: NDArray[np.float64] = np.exp(logits - logits.max()).astype(np.float64)
    return exponentials
