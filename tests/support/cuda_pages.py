"""Random paged KV for the CUDA kernels, and attention over it in plain torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from allspan.kernels.cuda.attention.prefill import plan_prefill
from allspan.kernels.cuda.cache.pages import Cache, PageTable, Scores
from allspan.kernels.reference.attention import QUANTISED, append_kv

Pages = tuple[Tensor, Tensor, PageTable]


def random_pages(
    lengths: list[int], kv_heads: int, dim: int, page: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> Pages:
    """Keys and values [pages, kv_heads, page, dim], and the table of requests of these lengths, shuffled."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // page) for length in lengths]
    total = sum(counts) + 3
    shape = (total, kv_heads, page, dim)
    keys, values = (torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(2))
    indices = torch.randperm(total, generator=generator)[: sum(counts)].int().to(device)
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    return keys, values, PageTable(indptr, indices, torch.tensor(lengths, dtype=torch.int32, device=device))


def random_queries(count: int, heads: int, dim: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, heads, dim, generator=generator).to(dtype).to(device)


def expected(
    q: Tensor, pages: Pages, queries: list[int], scale: float | Scores, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """In float64, then float32: outputs and base-2 logarithms of the sums, for so many queries of each request. What no
    query sees may hold anything."""
    keys, values, table = pages
    of = Scores.of(scale)
    kv_heads, dim = keys.shape[1], q.shape[2]
    if table.first_heads is None:
        kv_head_of = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // kv_heads)
    else:
        kv_head_of = torch.repeat_interleave(torch.arange(kv_heads, device=q.device), table.first_heads.diff())
    out, lse = torch.zeros(q.shape, device=q.device), torch.full(q.shape[:2], -math.inf, device=q.device)
    end = 0
    for r, (length, count) in enumerate(zip(table.kv_lens.tolist(), queries, strict=True)):
        begin, end = end, end + count
        if length == 0 or count == 0:
            continue
        held = table.indices[table.indptr[r] : table.indptr[r + 1]].long()
        k, v = (c[held].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :length].double() for c in (keys, values))
        k, v = k[kv_head_of], v[kv_head_of]
        scores = torch.einsum("qhd,hnd->qhn", q[begin:end].double(), k) * of.scale
        if of.soft_cap:
            scores = of.soft_cap * (scores / of.soft_cap).tanh()
        last = length - count + torch.arange(count, device=q.device)[:, None]
        tokens = torch.arange(length, device=q.device)
        if of.slopes is not None:
            scores += of.slopes.double()[:, None] * (tokens - last)[:, None]
        if is_causal:
            scores.masked_fill_((tokens > last)[:, None], -math.inf)
        if of.window_left >= 0:
            scores.masked_fill_((tokens < last - of.window_left)[:, None], -math.inf)
        if of.sinks is not None:
            scores = torch.cat((scores, of.sinks.double()[:, None].expand(count, -1, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        seen = (weights > 0).any(1).any(0)
        out[begin:end] = torch.einsum("qhn,hnd->qhd", weights[..., seen], v[:, seen]).float()
        lse[begin:end] = scores.logsumexp(-1).float() * math.log2(math.e)
    return out, lse


def coded(keys: Tensor, values: Tensor, dtype: torch.dtype) -> Cache:
    """The same pages in codes: int8, uint8 (two elements a byte), float8_e4m3fn."""
    if dtype is torch.float8_e4m3fn:
        return keys.to(dtype), values.to(dtype)
    pages, kv_heads, page_size, dim = keys.shape
    held = dim // 2 if dtype is torch.uint8 else dim
    caches = [torch.empty(pages, kv_heads, page_size, held, dtype=dtype, device=keys.device) for _ in range(2)]
    scales = [torch.empty(pages, kv_heads, 2, page_size, device=keys.device) for _ in range(2)]
    slots = torch.arange(pages * page_size, device=keys.device)
    k, v = (x.transpose(1, 2).flatten(0, 1).float() for x in (keys, values))
    append_kv(k, v, caches[0], caches[1], scales[0], scales[1], slots)
    return caches[0], caches[1], scales[0], scales[1]


def decoded(cache: Cache) -> tuple[Tensor, Tensor]:
    """What such pages hold, in float32."""
    keys, values, *scales = cache
    if not scales or scales[0] is None or scales[1] is None:
        return keys.float(), values.float()
    held = []
    for codes, zero_scale in ((keys, scales[0]), (values, scales[1])):
        zero, scale = zero_scale[..., None].unbind(2)
        size = codes.shape[-1] * (2 if codes.dtype is torch.uint8 else 1)
        held.append((QUANTISED[codes.dtype].unpack(codes, size).float() - zero) * scale)
    return held[0], held[1]


def sizes_apart(cache: Cache) -> Tensor:
    """What the codes and the zeros of values are, whose products are added up apart; float32."""
    keys, values, *scales = cache
    if not scales or scales[1] is None:
        return decoded(cache)[1].abs()
    zero, scale = scales[1].unbind(2)
    _, of_codes = decoded((keys, values, scales[0], torch.stack((torch.zeros_like(zero), scale), 2)))
    return of_codes.abs() + (zero * scale).abs()[..., None]


def check_rounded(
    out: Tensor,
    q: Tensor,
    pages: Pages,
    queries: list[int],
    scale: float,
    is_causal: bool,
    weight_bits: int,
    sizes_of: Tensor | None = None,
) -> Tensor:
    """That `out`, of 16 bits, is what attention over these pages comes to, as close as it can be: products are exact,
    but each weight is rounded to `weight_bits` bits and the result to 8. With as much as 2^-12 of the weighted sizes of
    the values (`sizes_of`, or their own) for float32 and for powers by tables. Returns `expected`'s logarithms."""
    keys, values, table = pages
    right, lse = expected(q, pages, queries, scale, is_causal)
    sizes, _ = expected(q, (keys, values.abs() if sizes_of is None else sizes_of, table), queries, scale, is_causal)
    most = (2.0**-weight_bits + 2.0**-12) * sizes + 2.0**-8 * right.abs()
    excess = (out.float() - right).abs() - most
    assert not out.isnan().any()
    assert excess.max() <= 1e-6, (
        f"{excess.argmax().item()}: {out.flatten()[excess.argmax()]}, by {excess.max()} too far"
    )
    return lse


def check_prefill(
    prefill: Callable[..., None],
    batch: tuple[list[int], list[int]],
    heads: tuple[int, int],
    dim: int,
    page: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """A kernel with the arguments of `paged_prefill`, causal and not. `batch`: queries and tokens of each request;
    `heads`: KV heads and query heads of each."""
    (queries, lengths), (kv_heads, group) = batch, heads
    q = random_queries(sum(queries), kv_heads * group, dim, device, dtype)
    keys, values, table = pages = random_pages(lengths, kv_heads, dim, page, device, dtype)
    plan = plan_prefill(queries, lengths, group, device)
    for is_causal in (True, False):
        out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=device)
        prefill(q, (keys, values), table, plan, dim**-0.5, is_causal, out, lse)
        right, right_lse = expected(q, pages, queries, dim**-0.5, is_causal)
        torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=8e-3)
        torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)
