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
    rows: Tensor | None = None
    """[requests], for decode: which row of q and out is the request's; -1 leaves it out. None: row r is request r's."""
    first_heads: Tensor | None = None
    """[kv_heads + 1]: query heads first_heads[h] … first_heads[h + 1] - 1 read KV head h. None: as many read each."""


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
    _check_heads(out.shape[1], cache[0].shape[1], table.first_heads)
    if q.shape[1] < out.shape[1] or q.stride(2) != 1 or q.stride(1) != q.shape[2] or q.stride(0) % 8:
        raise ValueError(f"q: {tuple(q.shape)} {q.stride()} does not hold {out.shape[1]} heads one after the other")
    if out.dtype is not torch.bfloat16 or out.shape[::2] != q.shape[::2] or not out.is_contiguous():
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)} must be contiguous bfloat16, rows as q {tuple(q.shape)}")
    if lse is not None and (lse.dtype is not torch.float32 or lse.shape != out.shape[:2] or not lse.is_contiguous()):
        raise ValueError(f"lse: {lse.dtype} {tuple(lse.shape)} is not contiguous float32 {tuple(out.shape[:2])}")


def _check_heads(heads: int, kv_heads: int, first_heads: Tensor | None) -> None:
    if first_heads is None:
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"out: {heads} heads are no multiple of {kv_heads} KV heads; table.first_heads says whose they are"
            )
    elif first_heads.dtype is not torch.int32 or first_heads.shape != (kv_heads + 1,):
        raise ValueError(f"first_heads: {first_heads.dtype} {tuple(first_heads.shape)} is not int32 ({kv_heads + 1},)")


def _check_cache(q: Tensor, cache: tuple[Tensor, Tensor], head_dims: Sequence[int]) -> None:
    keys, values = cache
    dim, page_size = q.shape[2], keys.shape[2]
    if dim not in head_dims:
        raise ValueError(f"q: head_dim {dim} is not one of {tuple(head_dims)}")
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
    rows = table.rows
    if rows is not None and (rows.dtype is not torch.int32 or rows.shape != table.kv_lens.shape or rows.stride(0) != 1):
        raise ValueError(f"table.rows: {rows.dtype} {tuple(rows.shape)} is not int32, one for each request")
    if len(table.indptr) != len(table.kv_lens) + 1:
        raise ValueError(f"table: indptr of {len(table.indptr)} does not go with {len(table.kv_lens)} requests")
