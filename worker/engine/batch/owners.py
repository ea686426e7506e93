"""Owners: which rows are those of a rank's own requests, where ranks attend for requests of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from allspan.worker.cache.page_pool import Copy
from allspan.worker.step.buffer_sizes import BatchSizes

Longs = NDArray[np.int64]


class Owners:
    """The attention rank of each row. Where every rank attends for all requests, all rows are its own."""

    def __init__(self, sizes: BatchSizes) -> None:
        self._rank = sizes.attention_rank
        self._has_others = sizes.attention_ranks > 1
        self._owners: Longs = np.zeros(sizes.max_rows, dtype=np.int64)

    def enter(self, row: int, owner: int) -> None:
        """The request that gets the row has its pages with this rank."""
        self._owners[row] = owner

    def own(self, rows: Longs) -> NDArray[np.bool_] | None:
        """Which of these rows are this rank's; None: no other rank has any."""
        return self._owners[rows] == self._rank if self._has_others else None

    def copies(self, copies: Sequence[Copy]) -> list[Copy]:
        """Returns the copies that are of pages of this rank."""
        return [copy for copy in copies if copy.owner == self._rank]
