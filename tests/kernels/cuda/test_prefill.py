"""Prefill attention against float32: whole prompts, chunks behind others, ragged batches, shuffled pages."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from allspan.kernels.cuda.attention import prefill
from allspan.kernels.cuda.attention.prefill import PrefillPlan, cut_prefill, paged_prefill, plan_prefill
from allspan.kernels.cuda.cache.pages import PageTable, Scores, dense, dense_table
from support.cuda_pages import check_prefill, expected, random_pages, random_queries

BATCHES = {
    "one token": ([1], [1]),
    "ragged": ([5, 1, 0, 64], [5, 90, 3, 64]),
    "a prompt": ([200], [200]),
    "chunks": ([33, 129, 257], [500, 129, 300]),
    "a token behind many": ([1], [3000]),
}
HEADS = [(1, 1), (2, 3), (1, 7), (4, 4), (2, 8), (1, 16), (1, 32)]


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_prefill_agrees_with_float32(batch: tuple[list[int], list[int]], dim: int, page: int) -> None:
    for heads, dtype in itertools.product(HEADS, (torch.bfloat16, torch.float16)):
        check_prefill(paged_prefill, batch, heads, dim, page, "cuda", dtype)


@pytest.mark.parametrize(("dim", "heads"), [(64, (2, 3)), (80, (1, 4)), (128, (1, 7)), (256, (1, 2))])
@pytest.mark.parametrize("batch", [([1], [1]), ([5, 1, 0, 64], [5, 90, 3, 64]), ([33], [150])])
def test_small_batches_agree_with_float32(
    batch: tuple[list[int], list[int]], dim: int, heads: tuple[int, int], device: str
) -> None:
    check_prefill(paged_prefill, batch, heads, dim, 16, device)


def test_heads_that_take_turns(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of long prompts do, so that a cache holds what they read: here two, then the last one."""
    monkeypatch.setattr(prefill, "heads_at_once", lambda tiles, kv_heads: 2)
    check_prefill(paged_prefill, ([70, 5], [90, 5]), (3, 2), 64, 16, device)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("scores", [Scores(0.1, window_left=40), Scores(0.1, window_left=0), Scores(0.3, 100, 2.0)])
def test_windows_and_caps_agree_with_float32(scores: Scores, is_causal: bool, device: str) -> None:
    queries, lengths = [90, 3], [200, 3]
    q = random_queries(93, 2, 64, device)
    keys, values, table = pages = random_pages(lengths, 1, 64, 16, device)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=device)
    plan = plan_prefill(queries, lengths, 2, device)
    paged_prefill(q, (keys, values), table, plan, scores, is_causal, out, lse)
    right, right_lse = expected(q, pages, queries, scores, is_causal)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=8e-3)
    torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_padded", [False, True])
def test_keys_that_lie_in_no_pages(is_padded: bool, device: str) -> None:
    """Heads first, as some have it; two requests after each other, or in rows of 70 tokens."""
    queries, lengths = [20, 33], [20, 70]
    q = random_queries(53, 6, 64, device)
    keys, values = (random_queries(140, 2, 64, device) + i for i in range(2))
    starts = [0, 1] if is_padded else [50, 70]
    first = 0 if is_padded else 50
    held = [
        (x.view(2, 70, 2, 64).transpose(1, 2).contiguous().transpose(1, 2) if is_padded else x) for x in (keys, values)
    ]
    table = dense_table(*(torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, lengths)))
    out = torch.full_like(q, math.nan)
    paged_prefill(q, dense(*held), table, plan_prefill(queries, lengths, 3, device), 0.1, True, out, None)
    pages = [
        torch.cat((x[first : first + 20], x[first : first + 50], x[70:])).view(2, 70, 2, 64).transpose(1, 2)
        for x in (keys, values)
    ]
    whole = PageTable(*(torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 2], [0, 1], lengths)))
    right, _ = expected(q, (pages[0], pages[1], whole), queries, 0.1, is_causal=True)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=8e-3)


def test_a_fused_buffer_uneven_heads_and_single_queries_left_out(device: str) -> None:
    """As the engine has it: requests of one query go to decode, tiles lie in a buffer that is larger than they are."""
    queries, lengths = [1, 70, 0, 2], [9, 100, 4, 2]
    keys, values, table = random_pages(lengths, 2, 64, 16, device)
    fused = random_queries(sum(queries), 9, 64, device)
    table = replace(table, first_heads=torch.tensor([0, 2, 5], dtype=torch.int32, device=device))
    cut = cut_prefill(np.array(queries, np.int32), np.array(lengths, np.int32), 3, least=2)
    tiles = torch.full((len(cut) + 2, 2), -1, dtype=torch.int32)
    tiles[: len(cut)] = torch.from_numpy(cut)
    indptr = torch.tensor([0, 1, 71, 71, 73], dtype=torch.int32, device=device)
    out = torch.full((73, 5, 64), math.nan, device=device).bfloat16()
    plan = PrefillPlan(tiles.to(device), indptr, 73, 3)
    paged_prefill(fused, (keys, values), table, plan, 0.1, True, out, None)
    right, _ = expected(fused[:, :5], (keys, values, table), queries, 0.1, is_causal=True)
    torch.testing.assert_close(out[1:].float(), right[1:], rtol=1e-2, atol=8e-3)
    assert out[0].isnan().all()


def test_what_does_not_fit_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="request 1 has 9, of 8 tokens"):
        plan_prefill([1, 9], [1, 8], 1, device)
    keys, values, table = random_pages([10], 1, 128, 16, device)
    plan = plan_prefill([10], [10], 2, device)
    for wrong in (random_queries(10, 2, 100, device), random_queries(10, 2, 128, device).float()):
        with pytest.raises(ValueError, match="q: "):
            paged_prefill(wrong, (keys, values), table, plan, 0.1, True, torch.empty_like(wrong), None)
    q = random_queries(10, 4, 128, device)
    with pytest.raises(ValueError, match="plan: made for"):
        paged_prefill(q, (keys, values), table, plan, 0.1, True, torch.empty_like(q), None)
