"""For tests of the kernel library: random tensors, requests in pages, and attention in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LOG2E = math.log2(math.e)


def randn(*shape: int, device: str, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype).to(device)


def turned(x: Tensor, positions: Tensor, scale: float = 1.0, theta: float = 1e4) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions.cpu().double()[:, None] / scale * theta ** (-torch.arange(half).double() / half)
    cos, sin = (f(angles)[:, None].to(x.device) for f in (torch.cos, torch.sin))
    low, high = x.double().split(half, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: int = -1,
    cap: float = 0,
    bent: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Outputs and logarithms of queries, the last of the tokens; `bent`: slopes and sinks."""
    group, (count, _, dim), tokens = q.shape[1] // k.shape[1], q.shape, len(k)
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,nhd->qhn", q.double(), k) * (dim**-0.5 if scale is None else scale)
    if cap:
        scores = cap * (scores / cap).tanh()
    behind = torch.arange(tokens - count, tokens)[:, None] - torch.arange(tokens)
    hidden = (behind < 0 if causal else torch.zeros_like(behind, dtype=torch.bool)) | (
        (behind > window) if window >= 0 else False
    )
    slopes, sinks = bent
    if slopes is not None:
        scores -= slopes.double()[:, None] * behind[:, None].to(q.device)
    scores.masked_fill_(hidden[:, None].to(q.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None].expand(count, -1, 1)), -1)
    weights = scores.softmax(-1).nan_to_num()[..., :tokens]
    return torch.einsum("qhn,nhd->qhd", weights, v), scores.logsumexp(-1) * LOG2E


def close(found: Any, right: Any, tolerance: float = 2e-3) -> None:
    if found.dtype is torch.bfloat16:
        tolerance = 1e-2
    torch.testing.assert_close(found.double(), right.double(), rtol=tolerance, atol=tolerance)


class Batch:
    """Requests of these lengths in shuffled pages, as FlashInfer has them."""

    def __init__(self, lengths: list[int], device: str, page: int = 8, kv_heads: int = 2, dim: int = 64) -> None:
        counts = [-(-length // page) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3))
        self.cache = randn(len(order), 2, page, kv_heads, dim, device=device)
        indptr = torch.tensor([0, *counts]).cumsum(0).int()
        self.last = torch.tensor([(length - 1) % page + 1 if length else 0 for length in lengths], dtype=torch.int32)
        self.indptr, self.indices, self.lengths, self.page = indptr, order[: sum(counts)].int(), lengths, page
        self.table = [x.to(device) for x in (self.indptr, self.indices, self.last)]

    def kv(self, r: int) -> tuple[Tensor, Tensor]:
        held = self.cache[self.indices[self.indptr[r] : self.indptr[r + 1]].long().to(self.cache.device)]
        k, v = (held[:, i].reshape(-1, *self.cache.shape[3:])[: self.lengths[r]] for i in range(2))
        return k, v

    def expected(self, q: Tensor, counts: list[int], rotary: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
        outs = []
        for r, rows in enumerate(q.split(counts)):
            k, v = self.kv(r)
            if rotary:
                places = torch.arange(len(k))
                rows, k = turned(rows, places[len(k) - len(rows) :]), turned(k, places)
            outs.append(attended(rows, k, v, **options))
        return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])


def workspace(device: str) -> Tensor:
    return torch.empty(16, dtype=torch.uint8, device=device)
