"""Rows that begin with the same pages, which the prefix cache gave them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


class SharedPages:
    """Brings them together. What a row shares is settled when it joins (pages that it fills later are its own), so rows
    that go on are not looked at again, and where some have left the others' pages are not either."""

    def __init__(self, pages: Ints, page_size: int) -> None:
        """`pages` [rows, pages]: of each row, in place."""
        self._pages = pages
        self._page_size = page_size
        self.forget()

    def forget(self) -> None:
        """Drops what is kept of the last rows, as a request has joined."""
        self._asked: tuple[int, ...] = ()
        self._order: Longs = np.zeros(0, dtype=np.int64)
        self._common: Ints | None = None

    def of(self, rows: tuple[int, ...], num_computed: Longs) -> tuple[Longs, Ints | None]:
        """The rows in an order in which those that share pages are neighbours, and for each one how many tokens, of
        whole pages, it begins with as the next does; None: no rows share any. The same arrays while the rows are the
        same. `num_computed`: of every row, by its number."""
        if rows != self._asked:
            kept = np.isin(self._order, rows)
            if kept.sum() == len(rows):
                self._keep(kept)
            else:
                self._find(np.asarray(rows, dtype=np.int64), num_computed)
            self._asked = rows
        return self._order, self._common

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        """In this order what two rows have in common is the least that any neighbours from one to the other have."""
        if self._common is not None:
            self._common = np.minimum.reduceat(self._common, np.flatnonzero(kept))
            self._common[-1] = 0
            if not self._common.any():
                self._common = None
        self._order = self._order[kept]

    def _find(self, rows: Longs, num_computed: Longs) -> None:
        self._order, self._common = rows, None
        whole = num_computed[rows] // self._page_size
        most = int(whole.max(initial=0))
        if not most or len(np.unique(self._pages[rows, 0])) == len(rows):
            return
        # Without the pages that a row is still filling: it would part rows that share what comes before.
        table = np.where(np.arange(most) < whole[:, None], self._pages[rows, :most], -1).astype(np.int32)
        order = np.array(sorted(range(len(rows)), key=lambda row: table[row].tobytes()))
        table, whole = table[order], whole[order]
        differ = table[1:] != table[:-1]
        same = np.where(differ.any(1), differ.argmax(1), most)
        common = np.zeros(len(rows), dtype=np.int32)
        common[:-1] = np.minimum(same, np.minimum(whole[1:], whole[:-1])) * self._page_size
        if common.any():
            self._order, self._common = rows[order], common
