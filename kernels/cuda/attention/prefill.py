"""Prefill (and append) attention over paged KV on a GPU: see prefill.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.kernels.cuda.cache.pages import BENT, KV, PLAIN, Cache, PageTable, Scores, check_rows, kv_of, pitch
from allspan.kernels.cuda.jit.modules import Kernel, element_macro, kernel, launch

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_ROWS = 128  # of a tile of queries

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How a batch of queries is cut into tiles; int32 on the GPU."""

    tiles: Tensor
    """[n, 2]: request, and first row, those that see most first; a request of -1 is no tile."""
    qo_indptr: Tensor
    """[requests + 1]: where each request's queries begin."""
    queries: int
    """Rows of q."""
    group: int
    """Query heads that a KV head is read by, at most."""


def cut_prefill(queries: Ints, kv_lens: Ints, group: int, least: int = 1) -> Ints:
    """The tiles of a plan, on the host: int32 [n, 2]. Requests of fewer than `least` queries (int32 [requests]) get
    none. Raises ValueError for more queries than tokens."""
    wrong = (queries < 0) | (queries > kv_lens)
    if wrong.any():
        request = int(wrong.argmax())
        raise ValueError(
            f"queries: request {request} has {queries[request]}, of {kv_lens[request]} tokens in its pages"
        )
    return cut_rows(np.where(queries >= least, queries, 0), kv_lens - queries, group)


def cut_rows(queries: Ints, before: Ints, group: int) -> Ints:
    """Tiles of requests of so many queries, the first of which sees `before` tokens beside itself."""
    counts = (queries * group + (_ROWS - 1)) // _ROWS
    requests = np.repeat(np.arange(len(counts)), counts)
    rows = (np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)) * _ROWS
    seen = before[requests] + rows // group
    order = np.argsort(-seen, kind="stable")
    return np.stack((requests[order], rows[order]), 1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Tiling:
    """`cut_prefill` for models with up to `group` query heads a KV head."""

    group: int

    def __call__(self, counts: NDArray[np.int64], kv_lens: NDArray[np.int64]) -> Ints:
        """int32 [tiles, 2]."""
        return cut_prefill(counts.astype(np.int32), kv_lens.astype(np.int32), self.group)

    def most(self, tokens: int, requests: int) -> int:
        """Tiles that so many queries of so many requests may be cut into."""
        return -(-tokens * self.group // _ROWS) + requests


def plan_prefill(queries: Sequence[int], kv_lens: Sequence[int], group: int, device: torch.device | str) -> PrefillPlan:
    """For requests with so many queries (>= 0) each, the last of their tokens; `group` query heads read a KV head, or
    fewer. A plan may as well be made of buffers of the caller's that `cut_prefill` filled."""
    tiles = cut_prefill(np.array(queries, np.int32), np.array(kv_lens, np.int32), group)
    indptr = np.cumsum([0, *queries], dtype=np.int32)
    return PrefillPlan(torch.from_numpy(tiles).to(device), torch.from_numpy(indptr).to(device), sum(queries), group)


def heads_at_once(tiles: int, kv_heads: int) -> int:
    """KV heads whose tiles are taken together: all, so that the longest tiles of all heads come first, as long as the
    cache on the GPU holds what they read (the keys of 32,768 tokens and 8 heads do not fit into it)."""
    return max(1, min(kv_heads, 2048 // tiles))


def check_plan(plan: PrefillPlan, q: Tensor, kv_heads: int, table: PageTable, out: Tensor) -> None:
    """Raises ValueError for one made for other sizes."""
    group = plan.group if table.first_heads is not None else out.shape[1] // kv_heads
    made_for = (len(plan.qo_indptr) - 1, plan.queries, plan.group)
    if made_for != (wanted := (len(table.kv_lens), len(q), group)):
        raise ValueError(f"plan: made for (requests, queries, group) {made_for}, not {wanted}")


def paged_prefill(
    q: Tensor,
    cache: Cache | KV,
    table: PageTable,
    plan: PrefillPlan,
    scale: Scores | float,
    is_causal: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """out[i, h] = attention of query i; causal: over the tokens up to itself, the last query being the last token.

    q, out, cache, table, scale and lse as for `paged_decode`, but that the plan says which rows are whose, that a KV
    head is read by up to plan.group query heads, and that the cache may be `dense` tensors. Rows of requests that have
    no tiles are left alone. Raises ValueError for what does not fit, BackendUnavailable without CuPy.
    """
    kv, scores = kv_of(cache, q.shape[2]), Scores.of(scale)
    check_rows(q, kv.heads, table, out, lse)
    check_plan(plan, q, kv.heads, table, out)
    scores.check(out.shape[1])
    attend(q, kv, table, plan, scores, is_causal, (out, lse))


def attend(
    q: Tensor,
    kv: KV,
    table: PageTable,
    plan: PrefillPlan,
    scores: Scores,
    is_causal: bool,
    into: tuple[Tensor, Tensor | None],
    after: Tensor | None = None,
) -> None:
    """The launch alone. With a float32 out of [parts, rows, heads, head_dim], and lse likewise, each holds the state of
    one part of the tokens, without sinks. after: int32 [rows], how many tokens of a query's, its own included, come
    after those of the table, which are no row's last; None: the queries are the last tokens."""
    out, lse = into
    heads, dim = out.shape[-2:]
    parts = len(out) if out.dtype is torch.float32 else 1
    if len(plan.tiles) == 0:
        return
    arguments = [
        q, np.int64(q.stride(0)), *kv.arguments(), plan.tiles, plan.qo_indptr, table.indptr, table.indices,
        table.kv_lens, table.first_heads, out, lse, np.int32(len(q)), np.int32(heads), np.int32(kv.heads),
        np.int32(heads_at_once(len(plan.tiles), kv.heads)), np.int32(kv.page_size.bit_length() - 1),
        np.int32(is_causal), *scores.arguments(), scores.slopes, scores.sinks, after,
    ]  # fmt: skip
    kind = scores.macros() | element_macro(q.dtype, kv.tensors[0].dtype)
    partial, is_small = int(out.dtype is torch.float32), kv.page_size < _warp_tokens(dim)
    function = _kernel(kv.format, kv.is_scaled, dim, partial, is_small, kind)
    blocks = (len(plan.tiles) * kv.heads, parts)
    launch(function, blocks, 128 if dim <= 128 else 256, arguments, _shared(kv.format, kv.is_scaled, dim), True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yields the kernels of common head sizes; others are compiled at their first use."""
    for dim in (64, 128):
        for form in range(3):
            for partial in (0, 1):
                yield _kernel(form, form > 0, dim, partial, False, PLAIN)
    yield _kernel(0, False, 256, 0, False, PLAIN)
    for dim in (64, 128, 256):
        for kind in (PLAIN | element_macro(torch.float16), *BENT):
            yield _kernel(0, False, dim, 0, False, kind)


def _warp_tokens(dim: int) -> int:
    """Returns the tokens of a tile that one warp copies."""
    return 16 if dim <= 128 else 4


def _shared(form: int, is_scaled: bool, dim: int) -> int:
    tokens, row = (64 if dim <= 128 else 32), pitch(2 * dim)
    stage = 2 * tokens * (row if form == 0 else pitch(dim // (2 if form == 2 else 1))) + 16 * tokens * is_scaled
    return _ROWS * row + (form != 0) * 2 * tokens * row + 2 * stage


def _kernel(form: int, is_scaled: bool, dim: int, partial: int, has_small_pages: bool, kind: dict[str, int]) -> Kernel:
    return kernel(
        "attention/prefill.cu", "prefill",
        HEAD_DIM=dim, FORMAT=form, SCALED=int(is_scaled), PARTIAL=partial, SMALL_PAGES=int(has_small_pages), **kind,
    )  # fmt: skip
