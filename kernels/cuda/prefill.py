"""Prefill (and append) attention over paged KV on a GPU: see prefill.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.modules import kernel, launch
from allspan.kernels.cuda.pages import PageTable, check_pages

HEAD_DIMS = (64, 128)

_ROWS, _TOKENS, _THREADS = 128, 64, 128


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How a batch of queries is cut into tiles; int32 on the GPU."""

    tiles: Tensor
    """[n, 2]: request, and first row, those that see most first."""
    qo_indptr: Tensor
    """[requests + 1]: where each request's queries begin."""
    queries: int
    group: int


def plan_prefill(queries: Sequence[int], kv_lens: Sequence[int], group: int, device: torch.device | str) -> PrefillPlan:
    """For requests with so many queries (>= 0) each, the last of their tokens; `group` query heads read a KV head."""
    for request, (count, length) in enumerate(zip(queries, kv_lens, strict=True)):
        if not 0 <= count <= length:
            raise ValueError(f"queries: request {request} has {count}, of {length} tokens in its pages")
    tiles = [(r, first) for r, count in enumerate(queries) for first in range(0, count * group, _ROWS)]
    tiles.sort(key=lambda tile: kv_lens[tile[0]] - queries[tile[0]] + tile[1] // group, reverse=True)
    indptr = np.cumsum([0, *queries], dtype=np.int32)
    cut = np.array(tiles, dtype=np.int32).reshape(-1, 2)
    return PrefillPlan(torch.from_numpy(cut).to(device), torch.from_numpy(indptr).to(device), sum(queries), group)


def paged_prefill(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    table: PageTable,
    plan: PrefillPlan,
    scale: float,
    is_causal: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """out[i, h] = attention of query i; causal: over the tokens up to itself, the last query being the last token.

    q, out: bfloat16 [queries, heads, head_dim], contiguous; cache, table, scale and lse as for `paged_decode`. Several
    query heads of a KV head share its tiles. Raises ValueError for what does not fit, BackendUnavailable without CuPy.
    """
    keys, values = cache
    heads, dim = q.shape[1:]
    kv_heads, page_size = keys.shape[1], keys.shape[2]
    check_pages(q, cache, table, out, lse, HEAD_DIMS)
    made_for, wanted = (
        (len(plan.qo_indptr) - 1, plan.queries, plan.group),
        (len(table.kv_lens), len(q), heads // kv_heads),
    )
    if made_for != wanted:
        raise ValueError(f"plan: made for (requests, queries, group) {made_for}, not {wanted}")
    blocks = len(plan.tiles)
    if blocks == 0:
        return
    arguments = [
        q, keys, values, *(np.int64(keys.stride(i)) for i in range(3)), plan.tiles, plan.qo_indptr, table.indptr,
        table.indices, table.kv_lens, out, lse, np.int32(heads),
        np.int32(heads // kv_heads), np.int32(page_size.bit_length() - 1), np.int32(is_causal),
        np.float32(scale * math.log2(math.e)),
    ]  # fmt: skip
    function = kernel("prefill.cu", "prefill", HEAD_DIM=dim)
    launch(function, (blocks, kv_heads), _THREADS, arguments, (_ROWS + 2 * _TOKENS) * dim * 2)
