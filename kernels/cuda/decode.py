"""Decode attention over paged KV on a GPU: see decode.cu for how the work is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.modules import Kernel, gpu, kernel, launch
from allspan.kernels.cuda.pages import PageTable, check_pages

HEAD_DIMS = (64, 128, 256)
MOST_GROUP = 16
"""Query heads that read one KV head."""

_TILE, _ROWS = 16, 16  # tokens that a warp takes at a time; rows of a tile of queries


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Scratch of one call at a time; counters are zero before and after each."""

    partial: Tensor
    counters: Tensor


def decode_workspace(requests: int, kv_heads: int, head_dim: int, device: torch.device | str) -> DecodeWorkspace:
    """For up to so many requests and KV heads."""
    blocks = _blocks(torch.device(device))
    partial = torch.empty(_partial_floats(blocks, head_dim), dtype=torch.float32, device=device)
    return DecodeWorkspace(partial, torch.zeros(requests * kv_heads, dtype=torch.int32, device=device))


def paged_decode(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    table: PageTable,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    workspace: DecodeWorkspace,
) -> None:
    """out[i, h] = attention of query q[i, h] over the tokens of the request that row i is; of none, zeros.

    q: bfloat16 [rows, heads or more, head_dim], of which the first heads are read: it may be a fused buffer of queries,
    keys and values. out: bfloat16 [rows, heads, head_dim], contiguous; rows that are no request's (`PageTable.rows`)
    are left alone. cache: keys and values, bfloat16 [pages, kv_heads, page_size, head_dim] in any strides but the last,
    both alike; page_size is a power of two. A KV head is read by 1 to 16 query heads. scale: of q · k. lse: float32
    [rows, heads], contiguous: the logarithm to base 2 of the sum of the powers of e (-inf for none), or None.

    Lengths are read on the GPU only: a graph that was captured serves other ones, as long as the tensors stay. Not
    batch-invariant: where a request is cut depends on the others.

    Raises ValueError for what does not fit, BackendUnavailable without CuPy.
    """
    keys, values = cache
    heads, dim = out.shape[1:]
    requests, kv_heads, page_size = len(table.kv_lens), keys.shape[1], keys.shape[2]
    check_pages(q, cache, table, out, lse, HEAD_DIMS)
    _check(q, kv_heads, heads // kv_heads if table.first_heads is None else 1, workspace, table)
    function = _kernel(dim)
    stages, warps = (dict(function.defines)[macro] for macro in ("STAGES", "WARPS"))
    tiles = warps * stages * 2 * _TILE * dim * 2
    merged = warps * _ROWS * (dim + 2) * 4
    shared = max(tiles, merged) + (requests + 1) * 4 + 12
    arguments = [
        q, np.int64(q.stride(0)), keys, values, *(np.int64(keys.stride(i)) for i in range(3)), table.indptr,
        table.indices, table.kv_lens, table.rows, table.first_heads, out, lse, workspace.partial, workspace.counters,
        np.int32(requests), np.int32(kv_heads), np.int32(heads), np.int32(page_size.bit_length() - 1),
        np.float32(scale * math.log2(math.e)),
    ]  # fmt: skip
    launch(function, (_blocks(q.device),), warps * 32, arguments, shared)


def kernel_variants(capability: tuple[int, int]) -> tuple[Kernel, ...]:
    return tuple(map(_kernel, HEAD_DIMS))


def _kernel(dim: int) -> Kernel:
    """Two stages of eight warps keep 64 KB on their way; a GPU has no room for so many rows of 256."""
    return kernel("decode.cu", "decode", HEAD_DIM=dim, STAGES=4 if dim == 64 else 2, WARPS=4 if dim == 256 else 8)


def _blocks(device: torch.device) -> int:
    return gpu(device).multiprocessors


def _check(q: Tensor, kv_heads: int, group: int, workspace: DecodeWorkspace, table: PageTable) -> None:
    rows, dim, requests = len(q), q.shape[2], len(table.kv_lens)
    if group > MOST_GROUP:
        raise ValueError(f"q: {group} query heads read a KV head, at most {MOST_GROUP} may")
    if table.rows is None and requests != rows:
        raise ValueError(f"table: {requests} requests for {rows} queries; table.rows says whose they are")
    blocks = _blocks(workspace.partial.device)
    if workspace.counters.numel() < requests * kv_heads or workspace.partial.numel() < _partial_floats(blocks, dim):
        raise ValueError(f"workspace: not made for {requests} requests x {kv_heads} KV heads of {dim}")


def _partial_floats(blocks: int, head_dim: int) -> int:
    return blocks * 2 * _ROWS * (head_dim + 2)
