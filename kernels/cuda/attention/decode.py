"""Decode attention over paged KV on a GPU: see decode.cu for how the work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.cache.pages import BENT, KV, PLAIN, Cache, PageTable, Scores, check_rows, kv_of, pitch
from allspan.kernels.cuda.jit.modules import Kernel, element_macro, gpu, kernel, launch, shared_limit

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

MOST_GROUP = 16
"""Query heads that read one KV head."""

_ROWS = 16  # of partial results
_MOST_BLOCKS = 3  # of a multiprocessor


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
    cache: Cache | KV,
    table: PageTable,
    scale: Scores | float,
    out: Tensor,
    lse: Tensor | None,
    workspace: DecodeWorkspace,
) -> None:
    """out[i, h] = attention of query q[i, h] over the tokens of the request that row i is; of none, zeros.

    q: bfloat16 or float16 [rows, heads or more, head_dim], of which the first heads are read: it may be a fused buffer
    of queries, keys and values. out: of q's type [rows, heads, head_dim], contiguous; rows that are no request's
    (`PageTable.rows`) are left alone. The cache may be `dense` tensors. A KV head is read by 1 to 16 query heads;
    head_dim is a multiple of 16 up to 256, with pages of 8 bits of 32, of 4 bits of 64. scale: of q · k, or `Scores`.
    lse: float32 [rows, heads], contiguous: the logarithm to base 2 of the sum of the powers of e (-inf for none), or
    None.

    Lengths are read on the GPU only: a graph that was captured serves other ones, as long as the tensors stay. Not
    batch-invariant: where a request is cut depends on the others.

    Raises ValueError for what does not fit, BackendUnavailable without CuPy.
    """
    kv, scores = kv_of(cache, q.shape[2]), Scores.of(scale)
    heads, dim = out.shape[1:]
    requests = len(table.kv_lens)
    check_rows(q, kv.heads, table, out, lse)
    group = heads // kv.heads if table.first_heads is None else table.most_heads
    _check(q, kv.heads, group, workspace, table)
    device = gpu(q.device)
    scores.check(heads)
    halves = 1 + (group > 8)
    shape = _shape(kv.format, kv.is_scaled, dim, halves, device.shared_bytes)
    kind = scores.macros() | element_macro(q.dtype, kv.tensors[0].dtype)
    function = _kernel(kv.format, kv.is_scaled, dim, shape, halves, kind)
    arguments = [
        q, np.int64(q.stride(0)), *kv.arguments(), table.indptr, table.indices, table.kv_lens, table.rows,
        table.first_heads, out, lse, workspace.partial, workspace.counters, np.int32(requests), np.int32(kv.heads),
        np.int32(heads), np.int32(kv.page_size.bit_length() - 1), *scores.arguments(),
        scores.slopes, scores.sinks,
    ]  # fmt: skip
    shared = max(shape.shared + (4 * requests + kv.heads + 2) * 4, shape.least_shared)
    launch(function, (device.multiprocessors * shape.blocks,), shape.warps * 32, arguments, shared, is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yields the kernels of common head sizes and groups; others are compiled at their first use."""
    limit = shared_limit(capability)
    for dim in (64, 128, 256):
        for form in range(3) if dim < 256 else range(1):
            for halves in (1, 2) if form == 0 else (1,):
                yield _kernel(form, form > 0, dim, _shape(form, form > 0, dim, halves, limit), halves, PLAIN)
        for kind in (PLAIN | element_macro(torch.float16), *BENT):
            yield _kernel(0, False, dim, _shape(0, False, dim, 1, limit), 1, kind)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of the thread blocks of `decode`: its macros."""

    warps: int
    blocks: int
    """Blocks of a multiprocessor."""
    tile: int
    """Tokens of a warp's copies."""
    stages: int
    shared: int
    """Bytes, without what there is for each request and KV head."""
    least_shared: int
    """With so much, no more blocks share a multiprocessor, while another one stands idle."""


_TILES = {0: (16, (8, 1)), 1: (32, (4, 2)), 2: (32, (4, 3)), 3: (32, (8, 1))}
"""Tokens of a tile, warps of a block and, if there is room, blocks of a multiprocessor, by the format of the pages."""


def _shape(form: int, is_scaled: bool, dim: int, halves: int, limit: int) -> _Shape:
    """64 KB and more are on their way if there is room for them; 12 KB are left for what there is for each request."""
    tile, best = _TILES[form]
    read = 2 * tile * pitch(dim * 2 if form == 0 else dim // 2 if form == 2 else dim) + is_scaled * 16 * tile
    stage = -(-max(read, 8 * halves * (dim + 6) * 4) // 128) * 128
    for warps, blocks in (best, (4, 2), (4, 1), (2, 1), (1, 1)):
        room = (limit + 1024) // blocks - 1024 - 12288
        for stages in range(max(2, min(6, 180224 // (blocks * warps * stage))), 1, -1):
            shared = stages * (warps * stage + 8 * halves * (dim * 2 + 16))
            if shared <= room or (warps, stages) == (1, 2):
                return _Shape(warps, blocks, tile, stages, shared, (limit + 1024) // (blocks + 1) - 896)
    raise AssertionError


def _kernel(form: int, is_scaled: bool, dim: int, shape: _Shape, halves: int, kind: dict[str, int]) -> Kernel:
    return kernel(
        "attention/decode.cu", "decode",
        HEAD_DIM=dim, FORMAT=form, SCALED=int(is_scaled), STAGES=shape.stages, TILE=shape.tile,
        WARPS=shape.warps, BLOCKS=shape.blocks, HALVES=halves, **kind,
    )  # fmt: skip


def _blocks(device: torch.device) -> int:
    return gpu(device).multiprocessors * _MOST_BLOCKS


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
