"""What a request may ask of the sampler, one class each with the same verbs.

`add(row, params, prompt_len)` and `remove(row)` keep a feature's state for the rows of the batch; `apply(logits, rows,
positions)` changes logits [m, vocabulary] (float32) in place for those rows, and returns at once when none asks.
Order: min_tokens, then temperature, top-k, top-p, min-p.

Every filter is a threshold on its row's logits: what lies below becomes -inf. So tokens of equal logits stay or go
together, and the outcome depends neither on how a sort breaks ties nor on the other rows.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.protos.sampling import SamplingParams

Rows = NDArray[np.int64]

_FIRST_CANDIDATES = 256
"""Of top-p: how many of the most likely tokens are sorted before the whole vocabulary is."""


class Feature(Protocol):
    """One row of the sampler's list."""

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None: ...

    def remove(self, row: int) -> None: ...

    def apply(self, logits: Tensor, rows: Rows, positions: Rows) -> None: ...


class MinTokens:
    """Masks the ids that would end the request until it has `min_tokens` output tokens."""

    def __init__(self, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._eos = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._masks: dict[int, tuple[int, Tensor]] = {}

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos))
        if params.min_tokens > 0 and ids:
            self._masks[row] = (prompt_len + params.min_tokens, torch.tensor(sorted(ids)))

    def remove(self, row: int) -> None:
        self._masks.pop(row, None)

    def apply(self, logits: Tensor, rows: Rows, positions: Rows) -> None:
        if not self._masks:
            return
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            first, ids = self._masks.get(row, (0, None))
            if ids is not None and position < first:
                logits[i, ids.to(logits.device)] = -torch.inf


class PerRowValue:
    """A number a row, with a neutral value that does nothing."""

    def __init__(self, max_rows: int, neutral: float) -> None:
        self._neutral = neutral
        self._values = np.full(max_rows, neutral, dtype=np.float64)
        self._users: set[int] = set()

    def put(self, row: int, value: float) -> None:
        if value != self._neutral:
            self._values[row] = value
            self._users.add(row)

    def remove(self, row: int) -> None:
        self._values[row] = self._neutral
        self._users.discard(row)

    def users(self, rows: Rows) -> tuple[Rows, NDArray[np.float64]] | None:
        """Indices into `rows` of those with a value of their own, and these values; None: nobody."""
        if not self._users:
            return None
        values = self._values[rows]
        at = np.flatnonzero(values != self._neutral)
        return (at, values[at]) if at.size else None


class Temperature(PerRowValue):
    """Divides the logits. Greedy rows never come here."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, 1.0)

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        self.put(row, 1.0 if params.is_greedy else params.temperature)

    def apply(self, logits: Tensor, rows: Rows, positions: Rows) -> None:
        if self.users(rows) is not None:
            logits /= _column(self._values[rows], logits)


class TopK(PerRowValue):
    """Keeps the k largest logits, and those equal to the k-th."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, 0.0)

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        self.put(row, max(params.top_k, 0))

    def apply(self, logits: Tensor, rows: Rows, positions: Rows) -> None:
        used = self.users(rows)
        if used is None:
            return
        at, ks = used
        x = _select(logits, at)
        k = torch.from_numpy(ks).long().clamp(max=x.shape[1]).to(x.device)
        best = torch.topk(x, int(k.max()), dim=1).values
        _keep_from(logits, at, x, best.gather(1, k[:, None] - 1))


class TopP(PerRowValue):
    """Keeps the most likely tokens whose probabilities reach p: each one before which less than p has been gathered."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, 1.0)

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        self.put(row, params.top_p)

    def apply(self, logits: Tensor, rows: Rows, positions: Rows) -> None:
        used = self.users(rows)
        if used is None:
            return
        at, ps = used
        x = _select(logits, at)
        wanted = _column(ps, x, torch.float64) * cumulative_weights(x)[:, -1:]
        count = min(_FIRST_CANDIDATES, x.shape[1])
        best = torch.topk(x, count, dim=1).values
        gathered = cumulative_weights(best)
        if bool((gathered[:, -1:] < wanted).any()):
            best = torch.sort(x, dim=1, descending=True).values
            gathered = cumulative_weights(best)
        last = (gathered < wanted).sum(dim=1, keepdim=True).clamp(max=best.shape[1] - 1)
        _keep_from(logits, at, x, best.gather(1, last))


class MinP(PerRowValue):
    """Keeps tokens at least `min_p` times as likely as the most likely one."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, 0.0)

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        self.put(row, params.min_p)

    def apply(self, logits: Tensor, rows: Rows, positions: Rows) -> None:
        used = self.users(rows)
        if used is None:
            return
        at, ratios = used
        x = _select(logits, at)
        _keep_from(logits, at, x, x.amax(dim=1, keepdim=True) + _column(np.log(ratios), x))


def cumulative_weights(logits: Tensor) -> Tensor:
    """float64 [m, w]: running sums of exp(logit - largest), each row added up from left to right. The last is the
    total; a sum in another order would depend on the number of rows."""
    weights = torch.exp(logits - logits.amax(dim=1, keepdim=True))
    return torch.cumsum(weights, dim=1, dtype=torch.float64)


def _column(values: NDArray[np.float64], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.from_numpy(values).to(like.device, dtype or like.dtype)[:, None]


def _select(logits: Tensor, at: Rows) -> Tensor:
    """Those rows; all of them without a copy."""
    return logits if len(at) == logits.shape[0] else logits[torch.from_numpy(at).to(logits.device)]


def _keep_from(logits: Tensor, at: Rows, x: Tensor, threshold: Tensor) -> None:
    """Masks what lies below `threshold` [users, 1] in x (rows `at` of the logits) and writes these rows back."""
    kept = x.masked_fill_(x < threshold, -torch.inf)
    if kept is not logits:
        logits[torch.from_numpy(at).to(logits.device)] = kept
