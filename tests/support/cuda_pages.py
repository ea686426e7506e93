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
    out, lse = torch.zeros(q.shape, device=q.device), torch.full(q.shape[:2], -math.inf, device=q.device)
    end = 0
    for r, (length, count) in enumerate(zip(table.kv_lens.tolist(), queries, strict=True)):
        begin, end = end, end + count
        if length == 0 or count == 0:
            continue
        held = table.indices[table.indptr[r] : table.indptr[r + 1]].long()
        k, v = (c[held].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :length].float() for c in (keys, values))
        scores = torch.einsum("qhgd,hnd->qhgn", q[begin:end].view(count, kv_heads, -1, dim).float(), k) * scale
        if is_causal:
            last = length - count + torch.arange(count, device=q.device)
            hidden = torch.arange(length, device=q.device) > last[:, None]
            scores.masked_fill_(hidden[:, None, None], -math.inf)
        out[begin:end] = torch.einsum("qhgn,hnd->qhgd", scores.softmax(-1), v).flatten(1, 2)
        lse[begin:end] = scores.logsumexp(-1).flatten(1) * math.log2(math.e)
    return out, lse
