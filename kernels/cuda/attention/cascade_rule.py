"""Which rows of a decode step to attend to as a cascade: those that begin with the same tokens, where it pays.

Time is counted in tokens: of one KV head in bfloat16, as long as a multiprocessor reads it at its share of the memory's
bandwidth (16 ns on an H200 with heads of 128).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from allspan.kernels.cuda.attention import prefill_sm90
from allspan.kernels.cuda.attention.cascade import parts_of
from allspan.kernels.cuda.attention.prefill import cut_rows
from allspan.kernels.cuda.jit.modules import gpu

Ints = NDArray[np.int32]
Group = tuple[int, int]
"""Neighbouring rows, and tokens that they share: 0 of rows that share none."""

MOST_GROUPS = 8
"""The most groups of rows that share tokens; captured graphs have room for these and for the rows between them."""

READ_AGAIN = 0.4
"""What a shared token costs a further row in plain decode. Caches have much of it: 64 requests that share 8,192 tokens,
and 256 that share 32,768, were read at 2.2 and 2.5 times the memory's bandwidth (FlashInfer 0.6.14, H200)."""

TILE_TOKEN = {"wgmma": 1.25, "mma": 2.0, "codes": 3.0}
"""What a token costs a tile of 128 rows, by the kernel and the pages: at 490, 300 and some 200 TFLOP/s on an H200."""

LAUNCHES = 64_000
"""Cost of two more kernels and of states that are written and read, in heads of one element: 8 µs with heads of 128."""

_TILE_ROWS = 128
_DEPTH = 16
"""Levels of prefixes within prefixes among which the best are looked for; beyond that one serves all rows."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Rows in groups, cut for a level of a cascade over the page table that they have anyway. All on the host, in sizes
    that depend on the number of rows alone: groups of no rows and tiles of none (-1) fill them."""

    rows: Ints
    """[groups]."""
    tokens: Ints
    """[groups]: that each shares."""
    tiles: Ints
    """See `PrefillPlan`."""
    qo_indptr: Ints

    def tables(self, indptr: Ints, kv_lens: Ints, page_size: int) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
        """indptr and kv_lens of the level's table and of the rows' own, over the indices of the whole one. They begin
        where they must; the kernels do not read where a request's pages end."""
        shared = np.repeat(self.tokens, self.rows)
        own = indptr + np.append(shared // page_size, np.int32(0)), kv_lens - shared
        return (indptr[self.qo_indptr], self.tokens), own


@dataclass(frozen=True, slots=True)
class CascadeRule:
    """The same for every rank of a world, whose GPUs are alike."""

    kv_heads: int
    """Most KV heads of a rank."""
    group: int
    """Query heads that a KV head is read by, at most."""
    head_dim: int
    tile_token: float
    """One of TILE_TOKEN."""
    most_tokens: int
    """Most tokens of a request."""
    device: torch.device

    def parts(self, rows: int) -> int:
        """In so many the shared tokens of a step of so many rows are cut."""
        return parts_of(self._tiles(rows) * self.kv_heads, self.most_tokens, self.device)

    def sizes(self, rows: int) -> tuple[int, int]:
        """Groups and tiles of a `Sharing` of so many rows."""
        groups = min(rows, 2 * MOST_GROUPS + 1)
        return groups, groups + rows * self.group // _TILE_ROWS

    def may_pay(self, rows: int) -> bool:
        """Whether anything that so many rows could share would."""
        return self._pays([(rows, self.most_tokens)], rows)

    def choose(self, common: Ints, rows: int) -> Sharing | None:
        """common[i]: tokens, whole pages, that row i begins with as row i + 1 does, of a step of so many `rows`, the
        others of which are padding. None where plain decode takes no longer."""
        _, groups = self._best(common, 0, len(common), _DEPTH)
        most = sorted(range(len(groups)), key=lambda i: self._gain(*groups[i]), reverse=True)[:MOST_GROUPS]
        groups = [group if i in most else (group[0], 0) for i, group in enumerate(groups)]
        if not self._pays(groups, rows):
            return None
        return self.cut([*groups, (rows - len(common), 0)], rows)

    def cut(self, groups: Sequence[Group], rows: int) -> Sharing:
        """`groups` are all rows, up to MOST_GROUPS of which share something."""
        merged: list[Group] = []
        for count, tokens in groups:
            if merged and not tokens and not merged[-1][1]:
                merged[-1] = merged[-1][0] + count, 0
            elif count:
                merged.append((count, tokens))
        most, most_tiles = self.sizes(rows)
        table = np.zeros((most, 2), np.int32)
        table[: len(merged)] = merged
        counts, tokens_of = np.ascontiguousarray(table.T)
        tiles = np.full((most_tiles, 2), -1, np.int32)
        cut = cut_rows(counts, tokens_of, self.group)
        tiles[: len(cut)] = cut
        return Sharing(counts, tokens_of, tiles, np.cumsum([0, *counts], dtype=np.int32))

    def _best(self, common: Ints, first: int, end: int, depth: int) -> tuple[float, list[Group]]:
        """Rows first … end - 1 in groups, and what these gain: one of all, or, where that gains more, those of the
        rows between the places where the fewest tokens are common."""
        gaps = common[first : end - 1]
        tokens = int(gaps.min(initial=self.most_tokens))
        best = max(0.0, self._gain(end - first, tokens)), [(end - first, tokens)]
        if best[0] == 0:
            best = 0.0, [(end - first, 0)]
        if depth and gaps.max(initial=0) > tokens:
            edges = [first, *(first + 1 + np.flatnonzero(gaps == tokens)).tolist(), end]
            parts = [self._best(common, *edge, depth - 1) for edge in itertools.pairwise(edges)]
            gain = sum(part for part, _ in parts)
            if gain > best[0]:
                return gain, [group for _, groups in parts for group in groups]
        return best

    def _tiles(self, rows: int) -> int:
        return -(-rows * self.group // _TILE_ROWS)

    def _gain(self, rows: int, tokens: int) -> float:
        """In tokens of each KV head."""
        return (READ_AGAIN * (rows - 1) - self.tile_token * self._tiles(rows)) * tokens

    def _pays(self, groups: Sequence[Group], rows: int) -> bool:
        """Tiles end at the latest when what all of them take, evenly spread, and the longest one are over (R. Graham,
        Bounds on Multiprocessing Timing Anomalies, 1969)."""
        gain = sum(self._gain(*group) for group in groups) * self.kv_heads / gpu(self.device).multiprocessors
        longest = max((tokens for _, tokens in groups), default=0)
        return gain > self.tile_token * longest / self.parts(rows) + LAUNCHES / self.head_dim


def tile_token(pages: str, page_size: int, head_dim: int, device: torch.device) -> float:
    """Returns the entry of TILE_TOKEN for the kernel that `paged_cascade` takes with pages of this format."""
    if pages not in ("bfloat16", "float16"):
        return TILE_TOKEN["codes"]
    is_hopper = head_dim in prefill_sm90.HEAD_DIMS and page_size >= prefill_sm90.LEAST_PAGE
    return TILE_TOKEN["wgmma" if is_hopper and gpu(device).capability == prefill_sm90.CAPABILITY else "mma"]
