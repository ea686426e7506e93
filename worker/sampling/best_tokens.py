"""Greedy decoding without whole rows: each rank finds the best of its own columns, and the ranks exchange those."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.kernels.abi.sampling import NOT_FINITE
from allspan.worker.parallel.base import Collectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.processor import Logits


class BestTokens:
    """The most likely token of each row over all ranks' columns of the vocabulary; every rank gets all of them."""

    def __init__(self, max_rows: int, widths: tuple[int, ...], collectives: Collectives, sampling: Sampling) -> None:
        """`max_rows`: of most steps; a request with drafts has several. `widths`: columns of each rank's logits; a
        single one: `collectives` is of this rank alone."""
        self._collectives = collectives
        self._kernel = sampling.kernel
        self._to_host = sampling.to_host
        self._device = sampling.device if len(widths) > 1 else None
        """Finds the best columns where the logits are, so that they need not be copied to the host."""
        self._first_columns = np.cumsum((0, *widths[:-1]), dtype=np.int32)
        self._seen: Tensor | None = None
        self._seen_as: Logits = np.zeros((0, 0), dtype=np.float32)
        """`_seen` for numpy: a model gives out the same tensor at every step of as many rows."""
        self._at = np.arange(max_rows)
        self._mine = torch.empty((1, 2), dtype=torch.int32)
        self._everyone = torch.empty((collectives.size, 2), dtype=torch.int32)

    def of(self, logits: Tensor) -> NDArray[np.int32]:
        """Returns int32 [m] for float32 [m, widths[rank]]; NOT_FINITE for a row that has no best token."""
        if self._device:
            return self._of_ranks(self._device.best_pairs(logits))
        if logits is not self._seen:
            self._seen = logits if logits.is_cpu else None
            self._seen_as = self._to_host(logits).numpy()
        array = self._seen_as
        tokens = np.empty(len(array), dtype=np.int32)
        if len(array) > len(self._at):
            self._at = np.arange(len(array))
        self._kernel.best_tokens(array, tokens)
        if self._collectives.size > 1 and len(tokens) > 1:
            mine = np.empty((len(tokens), 2), dtype=np.int32)
            mine[:, 0] = tokens
            mine.view(np.float32)[:, 1] = array[self._at[: len(tokens)], np.maximum(tokens, 0)]
            return self._of_ranks(mine)
        if self._collectives.size > 1:
            tokens = self._one_of_ranks(array, tokens)
        if min(tokens.tolist(), default=0) < 0:
            tokens[tokens < 0] = NOT_FINITE
        return tokens

    def _of_ranks(self, mine: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the tokens for each rank's best columns, or what is wrong with them, and the bits of their logits,
        `mine` [m, 2]."""
        count, size = len(mine), self._collectives.size
        gathered = torch.empty((count * size, 2), dtype=torch.int32)
        self._collectives.all_gather_rows(torch.from_numpy(mine), gathered)
        everyone = gathered.numpy().reshape(count, size, 2)
        ranks = everyone.view(np.float32)[:, :, 1].argmax(axis=1)  # of equals the first, so the lowest id
        tokens = np.take_along_axis(everyone[:, :, 0], ranks[:, None], 1)[:, 0]
        is_bad = (tokens < 0) | (everyone[:, :, 0] == NOT_FINITE).any(axis=1)
        return np.where(is_bad, np.int32(NOT_FINITE), tokens + self._first_columns[ranks])

    def _one_of_ranks(self, logits: Logits, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The same for one row of `logits`, without array operations: after a step's weights they would come from
        memory, too."""
        column = int(ids[0])
        mine, everyone = self._mine.numpy(), self._everyone.numpy()
        mine[0, 0] = column
        mine.view(np.float32)[0, 1] = logits[0, max(column, 0)]
        self._collectives.all_gather_rows(self._mine, self._everyone)
        columns, values = everyone[:, 0].tolist(), everyone.view(np.float32)[:, 1].tolist()
        if NOT_FINITE in columns:
            ids[0] = NOT_FINITE
        else:
            rank = values.index(max(values))  # of equals the first, so the lowest id
            ids[0] = columns[rank] + (int(self._first_columns[rank]) if columns[rank] >= 0 else 0)
        return ids
