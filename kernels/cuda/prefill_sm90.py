"""Prefill (and append) attention on Hopper, over paged or contiguous KV: see prefill_sm90.cu."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.modules import Kernel, gpu, kernel, launch
from allspan.kernels.cuda.pages import PageTable, check_pages
from allspan.kernels.cuda.prefill import PrefillPlan, check_plan
from allspan.kernels.errors import BackendUnavailable

HEAD_DIMS = (64, 128)
CAPABILITY = (9, 0)
LEAST_PAGE = 16

_ROWS, _THREADS, _SLOTS, _REST = 128, 384, 6, 1024 + 256
_ENDLESS = 30
"""Binary logarithm of a page that no request is longer than."""


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    return [_kernel(dim) for dim in HEAD_DIMS] if capability == CAPABILITY else []


def _kernel(head_dim: int) -> Kernel:
    return kernel("prefill_sm90.cu", "prefill_sm90", HEAD_DIM=head_dim)


def paged_prefill_sm90(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    table: PageTable,
    plan: PrefillPlan,
    scale: float,
    is_causal: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """`paged_prefill`, with its arguments, results and errors, on GPUs of compute capability 9.0 alone, and for pages
    of 16 tokens or more."""
    keys = cache[0]
    page_size = keys.shape[2]
    check_pages(q, cache, table, out, lse, HEAD_DIMS)
    if page_size < LEAST_PAGE:
        raise ValueError(f"cache: pages of {page_size} tokens are below {LEAST_PAGE}; paged_prefill takes them")
    check_plan(plan, q, keys.shape[1], table, out)
    kv = _Kv(*cache, (keys.stride(0), keys.stride(1), keys.stride(2)), page_size.bit_length() - 1)
    _launch(q, kv, table, plan, scale, is_causal, out, lse)


def ragged_prefill_sm90(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    kv_indptr: Tensor,
    plan: PrefillPlan,
    scale: float,
    is_causal: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """`paged_prefill_sm90` over keys and values that lie one request after the other: bfloat16 [tokens, kv_heads,
    head_dim], request r having rows kv_indptr[r] … kv_indptr[r + 1] - 1 (int32 [requests + 1])."""
    pages = kv[0].unsqueeze(2), kv[1].unsqueeze(2)
    requests = len(kv_indptr) - 1
    one_each = torch.arange(requests + 1, dtype=torch.int32, device=kv_indptr.device)
    table = PageTable(one_each, kv_indptr[:-1], kv_indptr.diff())
    check_pages(q, pages, table, out, lse, HEAD_DIMS)
    check_plan(plan, q, kv[0].shape[1], table, out)
    one_page_each = _Kv(*kv, (kv[0].stride(0), kv[0].stride(1), kv[0].stride(0)), _ENDLESS)
    _launch(q, one_page_each, table, plan, scale, is_causal, out, lse)


@dataclass(frozen=True, slots=True)
class _Kv:
    keys: Tensor
    values: Tensor
    strides: tuple[int, int, int]
    """Elements from one page, KV head, token to the next."""
    page_shift: int


def _launch(
    q: Tensor,
    kv: _Kv,
    table: PageTable,
    plan: PrefillPlan,
    scale: float,
    is_causal: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    heads, dim = out.shape[1:]
    kv_heads, cut = kv.keys.shape[1], len(plan.tiles)
    if cut == 0:
        return
    arguments = [
        q, np.int64(q.stride(0)), kv.keys, kv.values, *map(np.int64, kv.strides), plan.tiles, plan.qo_indptr,
        table.indptr, table.indices, table.kv_lens, table.first_heads, out, lse, np.int32(heads), np.int32(kv_heads),
        np.int32(cut), np.int32(kv.page_shift), np.int32(is_causal), np.float32(scale * math.log2(math.e)),
    ]  # fmt: skip
    device = gpu(q.device)
    if device.capability != CAPABILITY:
        raise BackendUnavailable(
            f"prefill_sm90: made for compute capability 9.0, not {'.'.join(map(str, device.capability))}"
        )
    blocks = min(cut * kv_heads, device.multiprocessors)
    shared_bytes = (1 + _SLOTS) * _ROWS * dim * 2 + _REST
    launch(_kernel(dim), (blocks,), _THREADS, arguments, shared_bytes)
