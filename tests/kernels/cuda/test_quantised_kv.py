"""Attention over pages of int8, of 4 bits and of float8, against float32 over what those pages hold."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from allspan.kernels.cuda.attention.cascade import CascadeLevel, cascade_workspace, paged_cascade, plan_level
from allspan.kernels.cuda.attention.decode import decode_workspace, paged_decode
from allspan.kernels.cuda.attention.prefill import paged_prefill, plan_prefill
from allspan.kernels.cuda.cache.pages import PageTable
from allspan.kernels.cuda.jit.modules import HALVES
from support.cuda_pages import check_rounded, coded, decoded, expected, random_pages, random_queries, sizes_apart

DTYPES = {"int8": torch.int8, "uint4": torch.uint8, "float8": torch.float8_e4m3fn}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
HALF_BITS, BFLOAT16_BITS = 11, 8
"""Of a weight in decode, in prefill of bfloat16."""


def check_decode(
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    device: str,
    page: int = 16,
    q_dtype: torch.dtype = torch.bfloat16,
) -> None:
    kv_heads, group = heads
    q = random_queries(len(lengths), kv_heads * group, dim, device, q_dtype)
    keys, values, table = random_pages(lengths, kv_heads, dim, page, device)
    cache = coded(keys * 2 + 1, values * 2 - 3, dtype)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=device)
    paged_decode(q, cache, table, dim**-0.5, out, lse, decode_workspace(len(lengths), kv_heads, dim, device))
    pages = *decoded(cache), table
    right_lse = check_rounded(out, q, pages, [1] * len(q), dim**-0.5, False, HALF_BITS, sizes_apart(cache))
    torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [[1], [17, 0, 64, 65, 127, 128], [5000], [4096, 3, 1, 900], [77] * 512])
def test_decode_agrees_with_float32(lengths: list[int], dim: int, dtype: torch.dtype) -> None:
    for heads in ((1, 1), (3, 2), (4, 7), (8, 8), (1, 16)):
        for q_dtype in HALVES:
            check_decode(lengths, heads, dim, dtype, "cuda", q_dtype=q_dtype)


@pytest.mark.parametrize(
    ("dtype", "dim", "heads"),
    [("int8", 64, (2, 3)), ("uint4", 64, (2, 3)), ("uint4", 128, (1, 9)), ("float8", 128, (1, 9))],
)
@pytest.mark.parametrize("lengths", [[1, 0], [33, 700, 31]])
def test_small_batches_agree_with_float32(
    lengths: list[int], dim: int, heads: tuple[int, int], dtype: str, device: str
) -> None:
    check_decode(lengths, heads, dim, DTYPES[dtype], device)


@pytest.mark.parametrize("page", [1, 2, 4])
def test_pages_of_few_tokens_agree_with_float32(page: int, device: str) -> None:
    check_decode([33, 70], (2, 3), 64, torch.int8, device, page)
    check_prefill([33, 1], [33, 70], 4, 64, torch.int8, device, page)


@pytest.mark.parametrize("size", [1e-9, 1e6])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=["int8", "uint4"])
def test_queries_and_values_of_any_size_agree_with_float32(dtype: torch.dtype, size: float, device: str) -> None:
    """Half precision, in which they are multiplied, ends at 65,504."""
    lengths = [1, 90, 300]
    q = random_queries(3, 6, 64, device) * size
    keys, values, table = random_pages(lengths, 2, 64, 16, device)
    sizes = 10 ** (12 * torch.rand(values.shape[:3], generator=torch.Generator().manual_seed(2)) - 4)
    cache = coded(keys, values * sizes[..., None].to(device), dtype)
    out = torch.full_like(q, math.nan)
    paged_decode(q, cache, table, 0.1 / size, out, None, decode_workspace(3, 2, 64, device))
    check_rounded(out, q, (*decoded(cache), table), [1] * 3, 0.1 / size, False, HALF_BITS)


def check_prefill(
    queries: list[int],
    lengths: list[int],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    page: int = 16,
    q_dtype: torch.dtype = torch.bfloat16,
) -> None:
    q = random_queries(sum(queries), heads, dim, device, q_dtype)
    keys, values, table = random_pages(lengths, 2, dim, page, device)
    cache = coded(keys * 2 + 1, values * 2 - 3, dtype)
    out = torch.full_like(q, math.nan)
    paged_prefill(q, cache, table, plan_prefill(queries, lengths, heads // 2, device), dim**-0.5, True, out, None)
    keys, values = (held.to(q_dtype).float() for held in decoded(cache))  # as tensor cores get them
    bits = HALF_BITS if q_dtype is torch.float16 else BFLOAT16_BITS
    check_rounded(out, q, (keys, values, table), queries, dim**-0.5, True, bits)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("batch", [([1], [3000]), ([33, 129, 257], [500, 129, 300])])
def test_prefill_agrees_with_float32(batch: tuple[list[int], list[int]], dim: int, dtype: torch.dtype) -> None:
    for heads in (2, 6, 14):
        for q_dtype in HALVES:
            check_prefill(*batch, heads, dim, dtype, "cuda", q_dtype=q_dtype)


@pytest.mark.parametrize(("dtype", "dim"), [("int8", 64), ("uint4", 128), ("float8", 64)])
def test_small_prefills_agree_with_float32(dim: int, dtype: str, device: str) -> None:
    check_prefill([33, 1, 0], [150, 1, 4], 4, dim, DTYPES[dtype], device)


def test_queries_of_half_precision_agree_with_float32(device: str) -> None:
    check_decode([33, 700, 31], (2, 3), 64, torch.uint8, device, q_dtype=torch.float16)
    check_prefill([33, 1, 0], [150, 1, 4], 4, 64, torch.int8, device, q_dtype=torch.float16)


@pytest.mark.gpu
def test_a_captured_cascade_over_quantised_pages_serves_other_lengths() -> None:
    q = random_queries(40, 8, 128, "cuda")
    keys, values, table = random_pages([2048] + [60] * 40, 2, 128, 16, "cuda")
    cache = coded(keys, values, torch.uint8)
    plan, parts = plan_level([(40, 2048)], 4, 2, "cuda")
    shared = PageTable(table.indptr[:2], table.indices, table.kv_lens[:1])
    own = PageTable(table.indptr[1:].contiguous(), table.indices, table.kv_lens[1:].contiguous())
    workspace = cascade_workspace(40, (8, 2), 128, parts, "cuda")
    out = torch.empty_like(q)

    def run() -> None:
        paged_cascade(q, cache, [CascadeLevel(shared, plan, parts)], own, 0.1, out, None, workspace)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    own.kv_lens.copy_(torch.arange(40) + 5)
    graph.replay()
    first = table.indices[: table.indptr[1]]
    lists = [torch.cat((first, table.indices[table.indptr[1 + i] : table.indptr[2 + i]])) for i in range(40)]
    indptr = torch.tensor([0, *itertools.accumulate(map(len, lists))], dtype=torch.int32)
    whole = PageTable(indptr.cuda(), torch.cat(lists), own.kv_lens + 2048)
    right, _ = expected(q, (*decoded(cache), whole), [1] * 40, 0.1, is_causal=False)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.gpu)])
def test_float8_with_a_scale_for_each_token_and_head(dim: int, device: str) -> None:
    lengths, queries = [70, 33], [40, 1]
    keys, values, table = random_pages(lengths, 2, dim, 16, device)
    cache = (*(x.to(torch.float8_e4m3fn) for x in (keys, values)), *(torch.zeros(*keys.shape[:2], 2, 16) for _ in "kv"))
    cache = cache[0], cache[1], cache[2].to(device), cache[3].to(device)
    for scales in cache[2:]:
        scales[:, :, 1] = torch.rand(scales.shape[0], 2, 16).to(device) + 0.5
    read = [codes.float() * scales[:, :, 1, :, None] for codes, scales in (cache[::2], cache[1::2])]
    q = random_queries(41, 6, dim, device)
    out = torch.full_like(q, math.nan)
    paged_prefill(q, cache, table, plan_prefill(queries, lengths, 3, device), 0.1, True, out, None)
    right, _ = expected(q, (read[0], read[1], table), queries, 0.1, is_causal=True)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=1e-2)
    q, out = q[:2], out[:2]
    paged_decode(q, cache, table, 0.1, out, None, decode_workspace(2, 2, dim, device))
    right, _ = expected(q, (read[0], read[1], table), [1, 1], 0.1, is_causal=False)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=1e-2)


def test_a_token_that_could_not_be_quantised_is_told_to_whoever_reads_it(device: str) -> None:
    q = random_queries(2, 2, 64, device)
    keys, values, table = random_pages([20, 20], 1, 64, 16, device)
    values[table.indices[0], :, 3, 5] = math.inf
    out = torch.zeros_like(q)
    paged_decode(q, coded(keys, values, torch.int8), table, 0.1, out, None, decode_workspace(2, 1, 64, device))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
