"""Attention of many new tokens over latents on a GPU: the new tokens' keys and values are made, head by head."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.prefill import PrefillPlan, attend
from allspan.kernels.cuda.attention.prefill_sm90 import CAPABILITY
from allspan.kernels.cuda.cache.pages import KV, PLAIN, PageTable, Scores, dense_table
from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.latent.append import PAGES
from allspan.kernels.cuda.rows.arguments import TYPES
from allspan.kernels.latent_tensors import LatentWeights

LEAST_ROWS = 256
"""With fewer new tokens in a step, latents stay as they are. For one request keys and values pay from about 170 on."""

_SIZES = (192, 128)
"""Elements of a key and of a value that Hopper's kernel is made for."""
_MOST_SIZE, _STEP = 256, 16
_ROWS, _THREADS, _SLOTS, _REST = 128, 384, 3, 1024 + 256
_WHOLE = 1 << 30  # tokens of a page that nothing outgrows


def runs(sizes: tuple[int, int]) -> bool:
    """Whether there are kernels for keys and values of so many elements."""
    return sizes[1] <= sizes[0] <= _MOST_SIZE and sizes[0] % _STEP == 0


def attend_new(
    q: Tensor,
    weights: LatentWeights[Tensor],
    pages: tuple[Tensor, Tensor | None],
    tiled: tuple[PageTable, PrefillPlan],
    scale: float,
    into: tuple[Tensor, Tensor | None],
) -> None:
    """out[i, h] = causal attention of query i over the new tokens of its request, as pages hold them. into: out [rows,
    heads, e] and None or float32 lse [rows, heads], as `latent_attend` has them. Rows of no tile hold anything."""
    table, plan = tiled
    out, lse = into
    rows, heads, size = q.shape
    value, latent = weights.v_up.shape[1:]
    key = weights.k_up.shape[2]
    latents, keys = q.new_empty(rows, latent), torch.empty_like(q)
    on_hopper = gpu(q.device).capability == CAPABILITY and (size, value) == _SIZES
    values = (torch.empty_like if on_hopper or size == value else torch.zeros_like)(q)
    _gather(pages, table, plan, size - key, latents, keys)
    spread = latents.expand(heads, rows, latent)
    torch.bmm(spread, weights.k_up, out=keys[..., :key].transpose(0, 1))
    torch.bmm(spread, weights.v_up.transpose(1, 2), out=values[..., :value].transpose(0, 1))
    strides = (keys.stride(0) * 2, keys.stride(1) * 2, keys.stride(0) * 2)
    kv = KV((keys, values, None, None), strides, heads, _WHOLE, 0)
    ragged = dense_table(plan.qo_indptr[:-1], plan.qo_indptr.diff())
    if on_hopper:
        _attend_sm90(q, kv, ragged, plan, Scores(scale), (out, lse))
    elif size == value:
        attend(q, kv, ragged, plan, Scores(scale), True, (out, lse))
    else:
        wide = torch.empty_like(q)
        attend(q, kv, ragged, plan, Scores(scale), True, (wide, lse))
        out.copy_(wide[..., :value])


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """out becomes attention over the tokens of both; all [rows, heads, ..], logarithms to base 2."""
    rows, size = out.shape[0] * out.shape[1], out.shape[2]
    arguments = [out, lse, other, other_lse, np.int32(rows), np.int32(size)]
    function = kernel("latent/expand.cu", "latent_merge", FORMAT=1, **element_macro(out.dtype))
    launch(function, (-(-rows // 4),), 128, arguments, 0, True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """See variants.py."""
    for dtype in HALVES:
        kind = element_macro(dtype)
        yield kernel("latent/expand.cu", "latent_merge", FORMAT=1, **kind)
        if capability == CAPABILITY:
            yield _kernel_sm90(kind)
    for dtype in (*HALVES, *PAGES):
        yield kernel("latent/expand.cu", "latent_rows", FORMAT=TYPES[dtype], **element_macro(dtype))


def _gather(
    pages: tuple[Tensor, Tensor | None], table: PageTable, plan: PrefillPlan, rot: int, latents: Tensor, keys: Tensor
) -> None:
    cache, scales = pages
    arguments = [
        cache, scales, np.int64(cache.stride(0)), np.int64(cache.stride(2)), np.int32(cache.shape[2].bit_length() - 1),
        plan.qo_indptr, table.indptr, table.indices, table.kv_lens, np.int32(len(table.kv_lens)),
        np.int32(latents.shape[1]), np.int32(rot), np.int32(keys.shape[1]), np.int32(keys.shape[2]), latents, keys,
    ]  # fmt: skip
    function = kernel("latent/expand.cu", "latent_rows", FORMAT=TYPES[cache.dtype], **element_macro(keys.dtype))
    launch(function, (len(keys),), 128, arguments, 0, True)


def _attend_sm90(
    q: Tensor, kv: KV, table: PageTable, plan: PrefillPlan, scores: Scores, into: tuple[Tensor, Tensor | None]
) -> None:
    out, lse = into
    tiles, heads = len(plan.tiles), out.shape[1]
    arguments = [
        q, np.int64(q.stride(0)), *kv.tensors[:2], *map(np.int64, kv.strides), plan.tiles, plan.qo_indptr,
        table.indptr, table.indices, table.kv_lens, None, out, lse, np.int32(1), np.int32(len(q)), np.int32(heads),
        np.int32(heads), np.int32(heads), np.int32(tiles), np.int32(_WHOLE.bit_length() - 1), np.int32(True),
        *scores.arguments(), None, None, None,
    ]  # fmt: skip
    blocks = min(tiles * heads, gpu(q.device).multiprocessors)
    shared = (1 + _SLOTS) * _ROWS * _SIZES[0] * 2 + _REST
    launch(_kernel_sm90(element_macro(q.dtype)), (blocks,), _THREADS, arguments, shared)


def _kernel_sm90(kind: dict[str, int]) -> Kernel:
    sizes = {"HEAD_DIM": _SIZES[0], "VALUE_DIM": _SIZES[1]}
    return kernel("attention/prefill_sm90.cu", "prefill_sm90", **sizes, PARTIAL=0, **PLAIN, **kind)
