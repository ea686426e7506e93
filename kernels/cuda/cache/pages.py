"""Paged KV as the kernels of this folder take it, and what is refused before a launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES

Cache = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys and values [pages, kv_heads, page_size, e] of one dtype, in any strides but the last, both alike; page_size is a
power of two. q's own type or float8_e4m3fn (e = head_dim), or, with their zeros and scales as third and fourth (float32
[pages, kv_heads, 2, page_size], contiguous): int8, or uint8 that holds two elements a byte (see `append_kv` in
kernels/ops.py). float8 may have them, too."""

LOG2E = math.log2(math.e)


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
    most_heads: int = 16
    """With first_heads: no KV head is read by more, in decode. Up to 8 are faster."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of q · k before and in the softmax; wherever one is wanted, its scale alone will do."""

    scale: float
    window_left: int = -1
    """Tokens before its own that a query sees; -1: all."""
    soft_cap: float = 0.0
    """The logits are cap · tanh(q · k · scale / cap); 0: they are not capped."""
    slopes: Tensor | None = None
    """float32 [heads]: slope · (token's place - query's place) is added to the logits, after the cap (ALiBi)."""
    sinks: Tensor | None = None
    """float32 [heads]: a logit that joins the softmax of every query that sees a token, and has no value. It counts in
    the sums and their logarithms."""

    @classmethod
    def of(cls, scale: Scores | float) -> Scores:
        return scale if isinstance(scale, Scores) else cls(scale)

    def arguments(self) -> list[Any]:
        """What the kernels take: window, factor of q · k, cap; logits are in powers of 2."""
        inner = self.scale / self.soft_cap if self.soft_cap else self.scale * LOG2E
        return [np.int32(self.window_left), np.float32(inner), np.float32(self.soft_cap * LOG2E)]

    def macros(self) -> dict[str, int]:
        """The macros of scores.cuh: a kernel does what it is compiled for, and no more."""
        wanted = {
            "WINDOW": self.window_left >= 0,
            "SOFT_CAP": self.soft_cap > 0,
            "SLOPES": self.slopes is not None,
            "SINKS": self.sinks is not None,
        }
        return {macro: int(is_on) for macro, is_on in wanted.items()}

    def check(self, heads: int) -> None:
        """Raises ValueError for slopes and sinks that are not one of each query head."""
        for name, values in (("slopes", self.slopes), ("sinks", self.sinks)):
            if values is None:
                continue
            if values.dtype is not torch.float32 or values.shape != (heads,) or not values.is_contiguous():
                raise ValueError(f"{name}: {values.dtype} {tuple(values.shape)} is not contiguous float32 ({heads},)")


PLAIN = Scores(1.0).macros()
BENT = tuple({**PLAIN, macro: 1} for macro in PLAIN)
"""`Scores.macros` of each feature that some models have; of several at once, kernels are compiled when they come."""


@dataclass(frozen=True, slots=True)
class KV:
    """Keys and values as a kernel takes them."""

    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
    strides: tuple[int, int, int]
    """Bytes from page to page, head to head, token to token."""
    heads: int
    page_size: int
    format: int

    @property
    def is_scaled(self) -> bool:
        return self.tensors[2] is not None

    def arguments(self) -> list[Any]:
        return [*self.tensors, *(np.int64(stride) for stride in self.strides)]


_FORMATS = {
    torch.bfloat16: (0, 16), torch.float16: (0, 16), torch.int8: (1, 32), torch.uint8: (2, 64),
    torch.float8_e4m3fn: (3, 32),
}  # fmt: skip
"""FORMAT in kv.cuh, and what the head size is a multiple of."""
MOST_HEAD_DIM = 256
QUERIES = HALVES


_LONGEST = 1 << 30
"""Tokens of a page that nothing outgrows: a request's keys that lie together are one page."""


def dense(keys: Tensor, values: Tensor) -> KV:
    """Keys and values that lie in no pages: ragged, [tokens, kv_heads, head_dim], or padded, [requests, tokens,
    kv_heads, head_dim]; q's own type or float8_e4m3fn, in any strides but the last, both alike (so [kv_heads, tokens,
    head_dim] transposed will do). `dense_table` goes with them. Raises ValueError for what does not fit."""
    page, token, head = (keys.stride(-3), *keys.stride()[-3:-1]) if keys.ndim == 3 else keys.stride()[:3]
    if keys.shape != values.shape or keys.stride() != values.stride() or keys.stride(-1) != 1:
        raise ValueError(f"cache: keys {keys.shape} {keys.stride()} and values {values.shape} {values.stride()} differ")
    form, step = _format(keys, values)
    _check_dim(keys.dtype, step, keys.shape[-1])
    if form in (1, 2):
        raise ValueError(f"cache: {keys.dtype} needs pages, with zeros and scales")
    size = keys.element_size()
    _check_alignment(keys, values, (page * size, head * size, token * size))
    return KV((keys, values, None, None), (page * size, head * size, token * size), keys.shape[-2], _LONGEST, form)


def dense_table(starts: Tensor, kv_lens: Tensor) -> PageTable:
    """Request r has kv_lens[r] tokens, from token starts[r] of ragged tensors on, or in row starts[r] of padded ones.
    Both int32 [requests], on the GPU."""
    indptr = torch.arange(len(kv_lens) + 1, dtype=torch.int32, device=kv_lens.device)
    return PageTable(indptr, starts, kv_lens)


def kv_of(cache: Cache | KV, head_dim: int) -> KV:
    """Raises ValueError for tensors that a kernel would read past."""
    if isinstance(cache, KV):
        keys_dim = cache.tensors[0].shape[-1] * (2 if cache.format == 2 else 1)
        if head_dim != keys_dim:
            raise ValueError(f"q: head_dim {head_dim} is not that of the keys, {keys_dim}")
        return cache
    keys, values, *scales = cache
    form, step = _format(keys, values)
    _check_dim(keys.dtype, step, head_dim)
    elements = head_dim // 2 if form == 2 else head_dim
    if (
        keys.shape != values.shape
        or keys.stride() != values.stride()
        or keys.stride(3) != 1
        or keys.shape[3] != elements
    ):
        raise ValueError(f"cache: keys {keys.shape} {keys.stride()} and values {values.shape} {values.stride()} differ")
    page_size = keys.shape[2]
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"cache: page size {page_size} is no power of two")
    page, head, token = (keys.stride(i) * keys.element_size() for i in range(3))
    _check_alignment(keys, values, (page, head, token))
    k_scales, v_scales = scales if scales else (None, None)
    _check_scales(keys, form, k_scales, v_scales)
    return KV((keys, values, k_scales, v_scales), (page, head, token), keys.shape[1], page_size, form)


def _format(keys: Tensor, values: Tensor) -> tuple[int, int]:
    if keys.dtype not in _FORMATS or values.dtype is not keys.dtype:
        raise ValueError(f"cache: {keys.dtype} and {values.dtype} are not one of {', '.join(map(str, _FORMATS))}")
    return _FORMATS[keys.dtype]


def _check_dim(dtype: torch.dtype, step: int, head_dim: int) -> None:
    if head_dim % step or not 0 < head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"q: head_dim {head_dim} is no multiple of {step} up to {MOST_HEAD_DIM} ({dtype} pages)")


def _check_alignment(keys: Tensor, values: Tensor, strides: tuple[int, int, int]) -> None:
    if any(stride % 16 for stride in strides) or keys.data_ptr() % 16 or values.data_ptr() % 16:
        raise ValueError(f"cache: strides {keys.stride()} of {keys.dtype} are no multiples of 16 bytes")


def pitch(row: int) -> int:
    """Bytes from row to row in shared memory, of rows of so many: see kv.cuh."""
    return 32 if row <= 32 else 64 if row <= 64 else -(-row // 128) * 128


def _check_scales(keys: Tensor, form: int, k_scales: Tensor | None, v_scales: Tensor | None) -> None:
    if k_scales is None or v_scales is None:
        if form in (1, 2) or k_scales is not v_scales:
            raise ValueError(f"cache: {keys.dtype} pages need zeros and scales of keys and of values")
        return
    if form == 0:
        raise ValueError(f"cache: {keys.dtype} pages have no scales")
    wanted = (*keys.shape[:2], 2, keys.shape[2])
    for scales in (k_scales, v_scales):
        if scales.dtype is not torch.float32 or scales.shape != wanted or not scales.is_contiguous():
            raise ValueError(f"cache: scales {scales.dtype} {tuple(scales.shape)} are not contiguous float32 {wanted}")


def check_rows(q: Tensor, kv_heads: int, table: PageTable, out: Tensor, lse: Tensor | None) -> None:
    """Raises ValueError for tensors that a kernel would read or write past; it looks at no value on the GPU."""
    _check_table(table)
    _check_heads(out.shape[1], kv_heads, table.first_heads)
    if q.dtype not in QUERIES:
        raise ValueError(f"q: {q.dtype} is not bfloat16 or float16")
    if q.shape[1] < out.shape[1] or q.stride(2) != 1 or q.stride(1) != q.shape[2] or q.stride(0) % 8:
        raise ValueError(f"q: {tuple(q.shape)} {q.stride()} does not hold {out.shape[1]} heads one after the other")
    if q.data_ptr() % 16:
        raise ValueError("q: does not begin at a multiple of 16 bytes; take a copy of it")
    if out.dtype is not q.dtype or out.shape[::2] != q.shape[::2] or not out.is_contiguous():
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)} must be {q.dtype}, contiguous, as q {tuple(q.shape)}")
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


def _check_table(table: PageTable) -> None:
    for name, ints in (("indptr", table.indptr), ("indices", table.indices), ("kv_lens", table.kv_lens)):
        if ints.dtype is not torch.int32 or not ints.is_contiguous():
            raise ValueError(f"table.{name}: {ints.dtype} is not contiguous int32")
    rows = table.rows
    if rows is not None and (rows.dtype is not torch.int32 or rows.shape != table.kv_lens.shape or rows.stride(0) != 1):
        raise ValueError(f"table.rows: {rows.dtype} {tuple(rows.shape)} is not int32, one for each request")
    if len(table.indptr) != len(table.kv_lens) + 1:
        raise ValueError(f"table: indptr of {len(table.indptr)} does not go with {len(table.kv_lens)} requests")
