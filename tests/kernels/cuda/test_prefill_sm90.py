"""Hopper's prefill attention against float32: paged and contiguous KV, prompts, chunks, ragged batches."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from allspan.kernels.cuda.attention import prefill_sm90
from allspan.kernels.cuda.attention.prefill import PrefillPlan, plan_prefill
from allspan.kernels.cuda.attention.prefill_sm90 import attend_sm90, paged_prefill_sm90
from allspan.kernels.cuda.cache.pages import PageTable, Scores, dense, dense_table, kv_of
from allspan.kernels.cuda.jit import modules
from allspan.kernels.errors import BackendUnavailable
from support.cuda_pages import check_prefill, expected, random_pages, random_queries
from support.emulator.driver import EmulatorDriver

BATCHES = {
    "one token": ([1], [1]),
    "ragged": ([5, 1, 0, 64], [5, 90, 3, 64]),
    "a prompt": ([200], [200]),
    "a prompt of whole tiles": ([1024], [1024]),
    "chunks": ([33, 129, 257], [500, 129, 300]),
    "a token behind many": ([1], [3000]),
    "a long chunk": ([700], [5000]),
}
HEADS = [(1, 1), (2, 3), (1, 7), (4, 4), (2, 8), (1, 16), (1, 32), (1, 128)]


@pytest.fixture(scope="module")
def emulator() -> EmulatorDriver:
    return EmulatorDriver(capability=(9, 0))


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    """Its instructions are no other GPU's."""
    is_real = request.node.get_closest_marker("gpu") is not None
    if is_real and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_prefill_agrees_with_float32(batch: tuple[list[int], list[int]], dim: int, page: int) -> None:
    for heads, dtype in itertools.product(HEADS, (torch.bfloat16, torch.float16)):
        check_prefill(paged_prefill_sm90, batch, heads, dim, page, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_512_requests_agree_with_float32(dim: int) -> None:
    queries = [1 + 37 * i % 61 for i in range(512)]
    lengths = [count + 29 * i % 173 for i, count in enumerate(queries)]
    check_prefill(paged_prefill_sm90, (queries, lengths), (2, 3), dim, 16, "cuda")


@pytest.mark.parametrize(
    ("batch", "heads", "dim", "page"),
    [
        (([1], [1]), (2, 3), 128, 16),
        (([5, 1, 0, 64], [5, 90, 3, 64]), (1, 7), 64, 16),
        (([40, 3], [300, 1100]), (2, 4), 128, 32),
        (([70], [600]), (1, 2), 64, 128),
        (([130], [130]), (3, 1), 128, 16),
    ],
)
def test_small_batches_agree_with_float32(
    batch: tuple[list[int], list[int]], heads: tuple[int, int], dim: int, page: int, device: str
) -> None:
    check_prefill(paged_prefill_sm90, batch, heads, dim, page, device)


@pytest.mark.parametrize("queries", [[300], [40, 500]])
def test_heads_that_take_turns(queries: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of long prompts do, so that a cache holds what they read; rounds of some end amid the blocks."""
    monkeypatch.setattr(prefill_sm90, "_LONG", 0)
    check_prefill(paged_prefill_sm90, (queries, queries), (3, 2), 64, 16, device)


@pytest.mark.parametrize(("batch", "window"), [(([300], [600]), 130), (([70, 3], [70, 500]), 0), (([130], [200]), 500)])
def test_sliding_windows(batch: tuple[list[int], list[int]], window: int, device: str) -> None:
    queries, lengths = batch
    q, scores = random_queries(sum(queries), 4, 64, device), Scores(0.1, window_left=window)
    keys, values, table = pages = random_pages(lengths, 2, 64, 32, device)
    plan = plan_prefill(queries, lengths, 2, device)
    for is_causal in (True, False):
        out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=device)
        paged_prefill_sm90(q, (keys, values), table, plan, scores, is_causal, out, lse)
        right, right_lse = expected(q, pages, queries, scores, is_causal)
        torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=8e-3)
        torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("is_causal", "window"), [(False, -1), (True, -1), (True, 300)])
def test_parts_of_the_tokens_add_up(is_causal: bool, window: int, device: str) -> None:
    """Those with nothing to see are told by their logarithms, also those of requests without tokens."""
    queries, lengths, parts = [3, 70, 2], [700, 70, 0 if not is_causal else 2], 4
    q, scores = random_queries(sum(queries), 4, 64, device), Scores(0.1, window_left=window)
    keys, values, table = pages = random_pages(lengths, 2, 64, 16, device)
    made = plan_prefill(queries, [max(x) for x in zip(queries, lengths, strict=True)], 2, device)
    out, lse = torch.full((parts, *q.shape), math.nan, device=device), torch.empty(parts, *q.shape[:2], device=device)
    attend_sm90(q, kv_of((keys, values), 64), table, made, scores, is_causal, (out, lse))
    right, right_lse = expected(q, pages, queries, scores, is_causal)
    weights = (lse * math.log(2)).softmax(0).nan_to_num(0)
    torch.testing.assert_close((out * weights[..., None]).sum(0), right, rtol=1e-2, atol=8e-3)
    torch.testing.assert_close((lse * math.log(2)).logsumexp(0) / math.log(2), right_lse, rtol=1e-3, atol=1e-3)
    assert lse[3, 3:].isneginf().all()


def test_uneven_heads_and_tiles_that_are_none(device: str) -> None:
    """As the engine has it: tiles lie in a buffer that is larger than they are, q in one with keys and values."""
    queries, lengths = [70, 0, 2], [300, 4, 2]
    keys, values, table = random_pages(lengths, 2, 64, 16, device)
    fused = random_queries(sum(queries), 9, 64, device)
    table = replace(table, first_heads=torch.tensor([0, 2, 5], dtype=torch.int32, device=device))
    made = plan_prefill(queries, lengths, 3, device)
    none = torch.full((3, 2), -1, dtype=torch.int32, device=device)
    plan = PrefillPlan(torch.cat((none[:1], made.tiles, none)), made.qo_indptr, made.queries, made.group)
    out = torch.full((72, 5, 64), math.nan, device=device).bfloat16()
    paged_prefill_sm90(fused, (keys, values), table, plan, 0.1, True, out, None)
    right, _ = expected(fused[:, :5], (keys, values, table), queries, 0.1, is_causal=True)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=8e-3)


@pytest.mark.parametrize("dim", [64, 128])
def test_contiguous_keys_and_values(dim: int, device: str) -> None:
    """Of requests that lie one after the other, in one buffer with what the kernel must not touch."""
    queries, lengths = [3, 0, 140], [200, 5, 140]
    begins = [0, *itertools.accumulate(lengths)]
    both = torch.randn(sum(lengths), 4, dim, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    keys, values = both[:, :2], both[:, 2:]
    q = random_queries(sum(queries), 6, dim, device)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in (begins[:-1], lengths))
    plan = plan_prefill(queries, lengths, 3, device)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=device)
    paged_prefill_sm90(q, dense(keys, values), dense_table(starts, lens), plan, 0.1, True, out, lse)
    for r, (first, length) in enumerate(zip(begins, lengths, strict=False)):
        mine = slice(sum(queries[:r]), sum(queries[: r + 1]))
        page = tuple(x[first : first + length].transpose(0, 1)[None] for x in (keys, values))
        table = PageTable(*(torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [0], [length])))
        right, right_lse = expected(q[mine], (*page, table), queries[r : r + 1], 0.1, is_causal=True)
        torch.testing.assert_close(out[mine].float(), right, rtol=1e-2, atol=8e-3)
        torch.testing.assert_close(lse[mine], right_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_graph_replays_with_other_inputs() -> None:
    queries, lengths = [300, 20], [1000, 900]
    q = random_queries(sum(queries), 8, 128, "cuda")
    pages = random_pages(lengths, 2, 128, 16, "cuda")
    plan, out = plan_prefill(queries, lengths, 4, "cuda"), torch.empty_like(q)
    paged_prefill_sm90(q, pages[:2], pages[2], plan, 0.1, True, out, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_prefill_sm90(q, pages[:2], pages[2], plan, 0.1, True, out, None)
    q.mul_(-1), out.fill_(math.nan)
    graph.replay()
    right, _ = expected(q, pages, queries, 0.1, is_causal=True)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=8e-3)


@pytest.mark.gpu
def test_a_prompt_longer_than_two_gigabytes_of_pages() -> None:
    """Offsets in the cache pass 2^31 elements."""
    page, kv_heads, dim = 128, 8, 128
    total = 2**31 // (kv_heads * page * dim) + 40
    keys, values = (torch.zeros(total, kv_heads, page, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    keys[-8:].normal_(), values[-8:].normal_()
    counts = torch.tensor([0, 8], dtype=torch.int32, device="cuda")
    indices = torch.arange(total - 8, total, dtype=torch.int32, device="cuda")
    pages = keys, values, PageTable(counts, indices, torch.tensor([1000], dtype=torch.int32, device="cuda"))
    q = random_queries(500, 32, dim, "cuda")
    out = torch.full_like(q, math.nan)
    paged_prefill_sm90(q, (keys, values), pages[2], plan_prefill([500], [1000], 4, "cuda"), 0.1, True, out, None)
    right, _ = expected(q, pages, [500], 0.1, is_causal=True)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=8e-3)


def test_what_does_not_fit_is_refused(device: str) -> None:
    plan = plan_prefill([10], [10], 2, device)
    q = random_queries(10, 2, 128, device)

    def run(q: torch.Tensor, page: int, scale: Scores | float, message: str) -> None:
        keys, values, table = random_pages([10], 1, q.shape[2], page, device)
        with pytest.raises(ValueError, match=message):
            paged_prefill_sm90(q, (keys, values), table, plan, scale, True, torch.empty_like(q), None)

    run(q, 8, 0.1, "pages of 8 tokens are below 16")
    run(q[..., :80].contiguous(), 16, 0.1, "head_dim 80 is not one of")
    run(random_queries(10, 4, 128, device), 16, 0.1, "plan: made for")


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "driver", EmulatorDriver)
    keys, values, table = random_pages([10], 1, 128, 16, "cpu")
    q = random_queries(10, 2, 128, "cpu")
    with pytest.raises(BackendUnavailable, match=r"compute capability 9\.0, not 8\.0"):
        paged_prefill_sm90(
            q, (keys, values), table, plan_prefill([10], [10], 2, "cpu"), 0.1, True, torch.empty_like(q), None
        )
