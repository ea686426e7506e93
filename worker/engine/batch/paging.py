"""Where the tokens of a step lie in the pages of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allspan.worker.cache.spec import PageLifetime
from allspan.worker.step.inputs import group_name

Longs = NDArray[np.int64]
Requests = tuple[Longs, Longs, Longs]
"""The row of each request of a step, the number of its tokens, and the position of the first."""


def paged_values(
    tables: Sequence[NDArray[np.int32]],
    lifetimes: Sequence[PageLifetime],
    page_size: int,
    rows: Longs,
    counts: Longs,
    starts: Longs,
) -> dict[str, NDArray[Any]]:
    """What attention reads of a step with `counts` tokens of `rows`, behind `starts` tokens: positions, slots and page
    tables, by the names that step inputs have. `tables` [rows, pages], one for each of `lifetimes`."""
    kv_lens, qo_indptr = starts + counts, indptr_of(counts)
    positions = np.arange(qo_indptr[-1]) + np.repeat(starts - qo_indptr[:-1], counts)
    page_counts = -(-kv_lens // page_size)
    page_indptr = indptr_of(page_counts)
    token_rows, page_rows = np.repeat(rows, counts), np.repeat(rows, page_counts)
    pages, offsets = np.divmod(positions, page_size)
    given = {"qo_indptr": qo_indptr, "page_indptr": page_indptr, "kv_lens": kv_lens, "positions": positions}
    for group, (lifetime, table) in enumerate(zip(lifetimes, tables, strict=True)):
        slots, indices = group_name("slots", group), group_name("page_indices", group)
        if group and lifetime.is_state:
            given |= {slots: table[token_rows, 0], indices: table[rows, 0]}
            given[group_name("page_indptr", group)] = np.arange(len(rows) + 1)
        else:
            given[slots] = table[token_rows, pages] * page_size + offsets
            given[indices] = table[page_rows, _nth(page_indptr)]
    return given


def each_token(rows: Longs, counts: Longs, starts: Longs) -> Requests:
    """The same tokens of the same rows, each as a request of its own."""
    begins = indptr_of(counts)
    positions = np.arange(begins[-1]) + np.repeat(starts - begins[:-1], counts)
    return np.repeat(rows, counts), np.ones_like(positions), positions


def indptr_of(counts: Longs) -> Longs:
    """[n + 1]: where each one's entries begin."""
    indptr = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def _nth(indptr: Longs) -> Longs:
    """[indptr[-1]]: each entry's number among its own."""
    return np.arange(indptr[-1]) - np.repeat(indptr[:-1], np.diff(indptr))
