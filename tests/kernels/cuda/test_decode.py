"""Decode attention against float32, over lengths, groups and head sizes, in shuffled pages."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.decode import decode_workspace, paged_decode
from allspan.kernels.cuda.cache.pages import Scores
from support.cuda_pages import Pages, random_pages, random_queries
from support.cuda_pages import expected as attended

LENGTHS = {
    "one token": [1],
    "none": [0],
    "edges": [17, 0, 64, 65, 127, 128],
    "long": [5000],
    "uneven": [4096, 3, 1, 900],
    "many": [random.Random(1).randrange(300) for _ in range(130)],
    "512": [random.Random(2).randrange(90) for _ in range(512)],
}


def case(
    lengths: list[int],
    kv_heads: int,
    group: int,
    dim: int,
    page: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Pages]:
    q = random_queries(len(lengths), kv_heads * group, dim, device, dtype)
    return q, random_pages(lengths, kv_heads, dim, page, device, dtype)


def expected(q: Tensor, pages: Pages, scale: float | Scores) -> tuple[Tensor, Tensor]:
    return attended(q, pages, [1] * len(q), scale, is_causal=False)


def check(
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    page: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    kv_heads, group = heads
    q, (keys, values, table) = case(lengths, kv_heads, group, dim, page, device, dtype)
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:2], math.nan, device=device)
    workspace = decode_workspace(len(lengths), kv_heads, dim, device)
    paged_decode(q, (keys, values), table, dim**-0.5, out, lse, workspace)
    right, right_lse = expected(q, (keys, values, table), dim**-0.5)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=8e-3)
    torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)
    assert not workspace.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_decode_agrees_with_float32(lengths: list[int], dim: int, page: int) -> None:
    for heads in ((1, 1), (3, 2), (8, 3), (1, 4), (4, 7), (8, 8), (1, 16)):
        for dtype in (torch.bfloat16, torch.float16):
            check(lengths, heads, dim, page, "cuda", dtype)


@pytest.mark.parametrize(("dim", "heads"), [(64, (3, 2)), (80, (1, 7)), (128, (1, 7)), (128, (1, 16)), (256, (2, 3))])
@pytest.mark.parametrize("lengths", [[1], [0], [17, 0, 64, 65, 127, 128], [700, 3, 1, 130]])
def test_small_batches_agree_with_float32(lengths: list[int], dim: int, heads: tuple[int, int], device: str) -> None:
    check(lengths, heads, dim, 16, device)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths() -> None:
    q, (keys, values, table) = case([700, 40], 4, 7, 128, 16, "cuda")
    out, workspace = torch.empty_like(q), decode_workspace(2, 4, 128, "cuda")
    paged_decode(q, (keys, values), table, 0.1, out, None, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode(q, (keys, values), table, 0.1, out, None, workspace)
    table.kv_lens.copy_(torch.tensor([3, 33]))
    graph.replay()
    torch.testing.assert_close(out.float(), expected(q, (keys, values, table), 0.1)[0], rtol=1e-2, atol=8e-3)


@pytest.mark.parametrize("scores", [Scores(0.1, window_left=40), Scores(0.1, window_left=0), Scores(0.3, 200, 2.0)])
def test_windows_and_caps_agree_with_float32(scores: Scores, device: str) -> None:
    q, (keys, values, table) = case([1, 41, 42, 300], 2, 3, 64, 16, device)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=device)
    paged_decode(q, (keys, values), table, scores, out, lse, decode_workspace(4, 2, 64, device))
    right, right_lse = expected(q, (keys, values, table), scores)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=8e-3)
    torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)


def test_a_fused_buffer_uneven_heads_and_requests_left_out(device: str) -> None:
    """As the engine has it: q is queries, keys and values of more rows than requests, KV heads have 3, 1 and 2 query
    heads, and a request whose row is -1 is another kernel's."""
    lengths, rows = [40, 300, 0, 7], [5, -1, 1, 3]
    fused, (keys, values, table) = case(lengths, 3, 4, 128, 16, device)
    fused = random_queries(7, 12, 128, device)
    ints = {"rows": rows, "first_heads": [0, 3, 4, 6]}
    table = replace(table, **{name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in ints.items()})
    out, lse = torch.full((7, 6, 128), math.nan, device=device).bfloat16(), torch.full((7, 6), math.nan, device=device)
    paged_decode(fused, (keys, values), table, 0.1, out, lse, decode_workspace(4, 3, 128, device))
    right, right_lse = attended(fused[rows, :6], (keys, values, table), [1] * 4, 0.1, is_causal=False)
    for request, row in enumerate(rows):
        if row >= 0:
            torch.testing.assert_close(out[row].float(), right[request], rtol=1e-2, atol=8e-3)
            torch.testing.assert_close(lse[row], right_lse[request], rtol=1e-3, atol=1e-3)
    assert out[[0, 2, 4, 6]].isnan().all()


def test_keys_and_values_of_one_tensor_by_tokens(device: str) -> None:
    """FlashInfer's NHD layout: [pages, 2, page_size, kv_heads, head_dim]."""
    q, (keys, values, table) = case([100, 31], 2, 4, 128, 16, device)
    both = torch.stack((keys, values), 1).transpose(2, 3).contiguous()
    out = torch.empty_like(q)
    views = both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
    paged_decode(q, views, table, 0.1, out, None, decode_workspace(2, 2, 128, device))
    torch.testing.assert_close(out.float(), expected(q, (keys, values, table), 0.1)[0], rtol=1e-2, atol=8e-3)


def test_what_does_not_fit_is_refused(device: str) -> None:
    q, (keys, values, table) = case([10], 1, 2, 128, 16, device)
    workspace = decode_workspace(1, 1, 128, device)
    wrongs = {
        "head_dim 100": q[..., :100].contiguous(),
        "float32": q.float(),
        "34 query heads": q.repeat(1, 17, 1),
        "3 queries": q.repeat(3, 1, 1),
        "16 bytes": torch.cat((q.flatten(), q.flatten()))[1 : 1 + q.numel()].view_as(q),
    }
    for name, wrong in wrongs.items():
        with pytest.raises(ValueError, match=name):
            paged_decode(wrong, (keys, values), table, 0.1, torch.empty_like(wrong), None, workspace)
    with pytest.raises(ValueError, match="lse"):
        paged_decode(q, (keys, values), table, 0.1, torch.empty_like(q), q[:, :, 0], workspace)
    for small in (decode_workspace(1, 1, 64, device), decode_workspace(0, 1, 128, device)):
        with pytest.raises(ValueError, match="workspace"):
            paged_decode(q, (keys, values), table, 0.1, torch.empty_like(q), None, small)
