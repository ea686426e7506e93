"""Random paged KV for the CUDA kernels, and attention over it in plain torch."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from allspan.kernels.cuda.pages import PageTable

Pages = tuple[Tensor, Tensor, PageTable]


def random_pages(lengths: list[int], kv_heads: int, dim: int, page: int, device: str) -> Pages:
    """Keys and values, bfloat16 [pages, kv_heads, page, dim], and the table of requests of these lengths, shuffled."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // page) for length in lengths]
    total = sum(counts) + 3
    shape = (total, kv_heads, page, dim)
    keys, values = (torch.randn(shape, generator=generator).bfloat16().to(device) for _ in range(2))
    indices = torch.randperm(total, generator=generator)[: sum(counts)].int().to(device)
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    return keys, values, PageTable(indptr, indices, torch.tensor(lengths, dtype=torch.int32, device=device))


def random_queries(count: int, heads: int, dim: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, heads, dim, generator=generator).bfloat16().to(device)


def expected(q: Tensor, pages: Pages, queries: list[int], scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """In float32: outputs and base-2 logarithms of the sums, for so many queries of each request."""
    keys, values, table = pages
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
        k, v = (c[held].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :length].float() for c in (keys, values))
        k, v = k[kv_head_of], v[kv_head_of]
        scores = torch.einsum("qhd,hnd->qhn", q[begin:end].float(), k) * scale
        if is_causal:
            last = length - count + torch.arange(count, device=q.device)
            hidden = torch.arange(length, device=q.device) > last[:, None]
            scores.masked_fill_(hidden[:, None], -math.inf)
        out[begin:end] = torch.einsum("qhn,hnd->qhd", scores.softmax(-1), v)
        lse[begin:end] = scores.logsumexp(-1) * math.log2(math.e)
    return out, lse
