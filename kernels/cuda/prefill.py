"""Prefill (and append) attention over paged KV on a GPU: see prefill.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.kernels.cuda.modules import Kernel, kernel, launch
from allspan.kernels.cuda.pages import PageTable, check_pages

HEAD_DIMS = (64, 128)

_ROWS, _TOKENS, _THREADS = 128, 64, 128

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
    counts = np.where(queries >= least, (queries * group + (_ROWS - 1)) // _ROWS, 0)
    requests = np.repeat(np.arange(len(counts)), counts)
    rows = (np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)) * _ROWS
    seen = (kv_lens - queries)[requests] + rows // group
    order = np.argsort(-seen, kind="stable")
    return np.stack((requests[order], rows[order]), 1).astype(np.int32)


def plan_prefill(queries: Sequence[int], kv_lens: Sequence[int], group: int, device: torch.device | str) -> PrefillPlan:
    """For requests with so many queries (>= 0) each, the last of their tokens; `group` query heads read a KV head, or
    fewer. A plan may as well be made of buffers of the caller's that `cut_prefill` filled."""
    tiles = cut_prefill(np.array(queries, np.int32), np.array(kv_lens, np.int32), group)
    indptr = np.cumsum([0, *queries], dtype=np.int32)
    return PrefillPlan(torch.from_numpy(tiles).to(device), torch.from_numpy(indptr).to(device), sum(queries), group)


def check_plan(plan: PrefillPlan, q: Tensor, kv_heads: int, table: PageTable, out: Tensor) -> None:
    """Raises ValueError for one made for other sizes."""
    group = plan.group if table.first_heads is not None else out.shape[1] // kv_heads
    made_for = (len(plan.qo_indptr) - 1, plan.queries, plan.group)
    if made_for != (wanted := (len(table.kv_lens), len(q), group)):
        raise ValueError(f"plan: made for (requests, queries, group) {made_for}, not {wanted}")


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

    q, out, cache, table, scale and lse as for `paged_decode`, but that the plan says which rows are whose, and that a
    KV head is read by up to plan.group query heads. Rows of requests that have no tiles are left alone.
    Raises ValueError for what does not fit, BackendUnavailable without CuPy.
    """
    keys, values = cache
    heads, dim = out.shape[1:]
    kv_heads, page_size = keys.shape[1], keys.shape[2]
    check_pages(q, cache, table, out, lse, HEAD_DIMS)
    check_plan(plan, q, kv_heads, table, out)
    blocks = len(plan.tiles)
    if blocks == 0:
        return
    arguments = [
        q, np.int64(q.stride(0)), keys, values, *(np.int64(keys.stride(i)) for i in range(3)), plan.tiles,
        plan.qo_indptr, table.indptr, table.indices, table.kv_lens, table.first_heads, out, lse, np.int32(heads),
        np.int32(page_size.bit_length() - 1), np.int32(is_causal),
        np.float32(scale * math.log2(math.e)),
    ]  # fmt: skip
    launch(_kernel(dim), (blocks, kv_heads), _THREADS, arguments, (_ROWS + 2 * _TOKENS) * dim * 2)


def kernel_variants(capability: tuple[int, int]) -> tuple[Kernel, ...]:
    return tuple(map(_kernel, HEAD_DIMS))


def _kernel(dim: int) -> Kernel:
    return kernel("prefill.cu", "prefill", HEAD_DIM=dim)
