"""Prefill (and append) attention on Hopper over keys and values of 16 bits: see prefill_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.prefill import PrefillPlan, check_plan
from allspan.kernels.cuda.cache.pages import BENT, KV, PLAIN, QUERIES, Cache, PageTable, Scores, check_rows, kv_of
from allspan.kernels.cuda.jit.modules import Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.errors import BackendUnavailable

HEAD_DIMS = (64, 128)
CAPABILITY = (9, 0)
LEAST_PAGE = 16
"""Tokens: fewer would be looked up one by one."""

_LONG = 512
"""Tiles of a KV head, of all of which the GPU's cache does not hold what they read; then heads take turns."""
_ROWS, _THREADS, _SLOTS, _REST = 128, 384, 6, 1024 + 256


def paged_prefill_sm90(
    q: Tensor,
    cache: Cache | KV,
    table: PageTable,
    plan: PrefillPlan,
    scale: Scores | float,
    is_causal: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """`paged_prefill`, with its arguments, results and errors, on GPUs of compute capability 9.0 alone, for what
    `why_not` has nothing against."""
    scores = Scores.of(scale)
    kv = kv_of(cache, q.shape[2])
    if reason := why_not(kv, q.shape[2]):
        raise ValueError(f"{reason}; paged_prefill takes that")
    check_rows(q, kv.heads, table, out, lse)
    check_plan(plan, q, kv.heads, table, out)
    scores.check(out.shape[1])
    attend_sm90(q, kv, table, plan, scores, is_causal, (out, lse))


def attend_sm90(
    q: Tensor,
    kv: KV,
    table: PageTable,
    plan: PrefillPlan,
    scores: Scores,
    is_causal: bool,
    into: tuple[Tensor, Tensor | None],
    after: Tensor | None = None,
) -> None:
    """`attend` of prefill.py: the launch alone."""
    out, lse = into
    if len(plan.tiles) == 0:
        return
    device = gpu(q.device)
    if device.capability != CAPABILITY:
        raise BackendUnavailable("prefill_sm90: made for compute capability 9.0, not {}.{}".format(*device.capability))
    heads, dim = out.shape[-2:]
    parts = len(out) if out.dtype is torch.float32 else 1
    arguments = [
        q, np.int64(q.stride(0)), *kv.tensors[:2], *map(np.int64, kv.strides), plan.tiles, plan.qo_indptr,
        table.indptr, table.indices, table.kv_lens, table.first_heads, out, lse, np.int32(parts), np.int32(len(q)),
        np.int32(heads), np.int32(kv.heads), np.int32(kv.heads if len(plan.tiles) < _LONG else 1),
        np.int32(len(plan.tiles)), np.int32(kv.page_size.bit_length() - 1), np.int32(is_causal), *scores.arguments(),
        scores.slopes, scores.sinks, after,
    ]  # fmt: skip
    blocks = min(len(plan.tiles) * kv.heads * parts, device.multiprocessors)
    kind = scores.macros() | element_macro(q.dtype, kv.tensors[0].dtype)
    function = _kernel(dim, int(out.dtype is torch.float32), kind)
    launch(function, (blocks,), _THREADS, arguments, (1 + _SLOTS) * _ROWS * dim * 2 + _REST)


def why_not(kv: KV, head_dim: int) -> str:
    """What of these the kernel is not made for; "" for nothing."""
    if kv.tensors[0].dtype not in QUERIES:
        return f"cache: {kv.tensors[0].dtype} is not bfloat16 or float16"
    if head_dim not in HEAD_DIMS:
        return f"q: head_dim {head_dim} is not one of {HEAD_DIMS}"
    if kv.page_size < LEAST_PAGE:
        return f"cache: pages of {kv.page_size} tokens are below {LEAST_PAGE}"
    return ""


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    if capability != CAPABILITY:
        return []
    kinds = [(partial, PLAIN | element_macro(dtype)) for dtype in QUERIES for partial in (0, 1)]
    kinds += [(0, kind) for kind in BENT]
    return [_kernel(dim, *kind) for dim in HEAD_DIMS for kind in kinds]


def _kernel(head_dim: int, partial: int, kind: dict[str, int]) -> Kernel:
    return kernel("attention/prefill_sm90.cu", "prefill_sm90", HEAD_DIM=head_dim, PARTIAL=partial, **kind)
