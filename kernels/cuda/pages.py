"""Paged KV as the kernels of this folder take it, and what is refused before a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageTable:
    """int32 on the GPU: request r has pages indices[indptr[r] : indptr[r + 1]] and kv_lens[r] tokens in them (>= 0)."""

    indptr: Tensor
    indices: Tensor
    kv_lens: Tensor


def check_pages(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    table: PageTable,
    out: Tensor,
    lse: Tensor | None,
    head_dims: Sequence[int],
) -> None:
    """Raises ValueError for tensors that a kernel would read or write past; it looks at no value on the GPU."""
    _check_cache(q, cache, head_dims)
    _check_table(table)
    if out.dtype is not torch.bfloat16 or out.shape != q.shape or not (q.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)} must be contiguous bfloat16, like q, {tuple(q.shape)}")
    if lse is not None and (lse.dtype is not torch.float32 or lse.shape != q.shape[:2] or not lse.is_contiguous()):
        raise ValueError(f"lse: {lse.dtype} {tuple(lse.shape)} is not contiguous float32 {tuple(q.shape[:2])}")


def _check_cache(q: Tensor, cache: tuple[Tensor, Tensor], head_dims: Sequence[int]) -> None:
    keys, values = cache
    heads, dim = q.shape[1:]
    kv_heads, page_size = keys.shape[1], keys.shape[2]
    if dim not in head_dims:
        raise ValueError(f"q: head_dim {dim} is not one of {tuple(head_dims)}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"q: {heads} heads are no multiple of {kv_heads} KV heads")
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"cache: page size {page_size} is no power of two")
    if keys.shape != values.shape or keys.stride() != values.stride() or keys.stride(3) != 1 or keys.shape[3] != dim:
        raise ValueError(f"cache: keys {keys.shape} {keys.stride()} and values {values.shape} {values.stride()} differ")
    for name, tensor in (("q", q), ("keys", keys), ("values", values)):
        if tensor.dtype is not torch.bfloat16:
            raise ValueError(f"{name}: {tensor.dtype} is not bfloat16")


def _check_table(table: PageTable) -> None:
    for name, ints in (("indptr", table.indptr), ("indices", table.indices), ("kv_lens", table.kv_lens)):
        if ints.dtype is not torch.int32 or not ints.is_contiguous():
            raise ValueError(f"table.{name}: {ints.dtype} is not contiguous int32")
    if len(table.indptr) != len(table.kv_lens) + 1:
        raise ValueError(f"table: indptr of {len(table.indptr)} does not go with {len(table.kv_lens)} requests")
