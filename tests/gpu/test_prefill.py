"""Prefill attention against float32: whole prompts, chunks behind others, ragged batches, shuffled pages."""

from __future__ import annotations

import math

import pytest
import torch

from allspan.kernels.cuda.prefill import paged_prefill, plan_prefill
from support.cuda_pages import expected, random_pages, random_queries

BATCHES = {
    "one token": ([1], [1]),
    "ragged": ([5, 1, 0, 64], [5, 90, 3, 64]),
    "a prompt": ([200], [200]),
    "chunks": ([33, 129, 257], [500, 129, 300]),
    "a token behind many": ([1], [3000]),
}
HEADS = [(1, 1), (2, 3), (1, 7), (4, 4), (2, 8), (1, 16), (1, 32)]


def check(batch: tuple[list[int], list[int]], heads: tuple[int, int], dim: int, page: int, device: str) -> None:
    """Causal and not."""
    (queries, lengths), (kv_heads, group) = batch, heads
    q = random_queries(sum(queries), kv_heads * group, dim, device)
    keys, values, table = pages = random_pages(lengths, kv_heads, dim, page, device)
    plan = plan_prefill(queries, lengths, group, device)
    for is_causal in (True, False):
        out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=device)
        paged_prefill(q, (keys, values), table, plan, dim**-0.5, is_causal, out, lse)
        right, right_lse = expected(q, pages, queries, dim**-0.5, is_causal)
        torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=8e-3)
        torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_prefill_agrees_with_float32(batch: tuple[list[int], list[int]], dim: int, page: int) -> None:
    for heads in HEADS:
        check(batch, heads, dim, page, "cuda")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(2, 3), (1, 7)])
@pytest.mark.parametrize("batch", [([1], [1]), ([5, 1, 0, 64], [5, 90, 3, 64]), ([33], [150])])
def test_small_batches_agree_with_float32(
    batch: tuple[list[int], list[int]], heads: tuple[int, int], dim: int, device: str
) -> None:
    check(batch, heads, dim, 16, device)


def test_what_does_not_fit_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="request 1 has 9, of 8 tokens"):
        plan_prefill([1, 9], [1, 8], 1, device)
    keys, values, table = random_pages([10], 1, 128, 16, device)
    plan = plan_prefill([10], [10], 2, device)
    for wrong in (random_queries(10, 2, 96, device), random_queries(10, 2, 128, device).float()):
        with pytest.raises(ValueError, match="q: "):
            paged_prefill(wrong, (keys, values), table, plan, 0.1, True, torch.empty_like(wrong), None)
    q = random_queries(10, 4, 128, device)
    with pytest.raises(ValueError, match="plan: made for"):
        paged_prefill(q, (keys, values), table, plan, 0.1, True, torch.empty_like(q), None)
