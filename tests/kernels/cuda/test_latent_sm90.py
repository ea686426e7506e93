"""Hopper's attention over latents, in float64 on what the pages hold."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch

from allspan.kernels.cuda.attention.prefill import plan_prefill
from allspan.kernels.cuda.cache.pages import PageTable
from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.latent.attend import merge
from allspan.kernels.cuda.latent.attend.attend import Cutting, Mode, Queries, attend_workspace, cutting, latent_attend
from support.emulator.driver import EmulatorDriver
from support.kernel_cases import BF16, I8, ints, randn
from support.latent_cases import Requests, attended_latents, paged_latents

F16 = torch.float16
FORMATS = {BF16: 5e-3, F16: 1e-3}
"""How far the norm may be off what float64 gives of the same pages."""
LATENT, TURNED, SCALE = 512, 64, 0.05
LONG = [0, 1, 33, 514, 2743, 8736, 17]


@pytest.fixture(scope="module")
def emulator() -> EmulatorDriver:
    return EmulatorDriver(capability=(9, 0))


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    """Its instructions are no other GPU's."""
    is_real = request.node.get_closest_marker("gpu") is not None
    if is_real and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")


def check(
    heads: int,
    page: int,
    requests: Requests,
    device: str,
    dtype: torch.dtype = BF16,
    is_before: bool = False,
    rows: list[int] | None = None,
) -> None:
    """Requests of one query each are decodes; else all come in a plan."""
    news, lengths = [new for new, _ in requests], [length for _, length in requests]
    cache, scales, indptr, indices = paged_latents(LATENT + TURNED, page, dtype, lengths)
    q = randn(sum(news), heads, LATENT + TURNED, seed=5).to(dtype)
    plan = None if max(news) == 1 else plan_prefill(news, lengths, 1, device)
    places = None if rows is None else ints(rows).to(device)
    table = PageTable(indptr.to(device), indices.to(device), ints(lengths).to(device), rows=places)
    queries = Queries(q[..., :LATENT].contiguous().to(device), q.to(device)[..., LATENT:])
    out, lse = torch.full_like(queries.latents, math.nan), torch.full(q.shape[:2], math.nan, device=device)
    workspace = attend_workspace(LATENT, device)
    pages = cache.to(device), scales
    assert cutting(queries, pages[0], plan).is_sm90
    latent_attend(queries, pages, table, plan, SCALE, (out, lse), workspace, Mode(is_before))
    assert not workspace.counters.any()
    for request, (new, length) in enumerate(requests):
        first = sum(news[:request]) if rows is None else rows[request]
        own = slice(first, first + new)
        if first < 0 or new == 0:
            continue
        held = pages[0][table.indices[indptr[request] : indptr[request + 1]].long()].flatten(0, 2)[:length].double()
        seen = held[: length - new] if is_before else held
        right, right_lse = attended_latents(q[own].to(device), seen, LATENT, SCALE, not is_before)
        found, found_lse = out[own].double(), lse[own].double()
        torch.testing.assert_close(found_lse, right_lse, rtol=1e-4, atol=1e-4)
        if len(seen) == 0:
            assert not found.any()
        else:
            assert float((found - right).norm() / right.norm()) < FORMATS[dtype]


@pytest.mark.parametrize(
    ("heads", "page", "requests"),
    [
        (64, 64, [(1, 33), (1, 0), (1, 64), (1, 200), (1, 129)]),
        (128, 16, [(1, 65), (1, 514), (1, 1)]),
        (128, 32, [(1, 0), (1, 128), (1, 0)]),
        (96, 128, [(1, 300)]),
        (192, 16, [(1, 140), (1, 7)]),
        (64, 32, [(3, 33), (2, 2), (1, 300), (4, 165)]),
        (128, 64, [(3, 150), (2, 30)]),
        (16, 16, [(9, 300), (7, 7), (0, 50)]),
    ],
)
def test_decodes_and_drafts(heads: int, page: int, requests: Requests, device: str) -> None:
    check(heads, page, requests, device)


@pytest.mark.parametrize(
    ("heads", "requests"),
    [
        (16, [(1, 33), (1, 0), (1, 700)]),
        (40, [(1, 514)]),
        (64, [(1, 33), (1, 0), (1, 64), (1, 700)]),
        (128, [(1, 1300)]),
        (96, [(1, 300)]),
        (256, [(1, 514)]),
    ],
)
def test_few_tiles_are_merged_by_blocks_of_their_own(
    heads: int, requests: Requests, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "LEAST_PIECES", 0)
    with patch.object(merge, "merge_rows", wraps=merge.merge_rows) as merge_rows:
        check(heads, 64, requests, device)
    merge_rows.assert_called_once()


@pytest.mark.parametrize(
    ("heads", "page", "requests"),
    [
        (16, 64, [(1, 33), (1, 0), (1, 64), (1, 200), (1, 129)]),
        (16, 16, [(1, 65), (1, 514), (1, 1)]),
        (12, 128, [(1, 700)]),
        (32, 32, [(1, 0), (1, 300), (1, 0)]),
        (40, 16, [(1, 140), (1, 7)]),
        (16, 64, [(2, 70), (2, 2), (1, 300)]),
        (16, 32, [(3, 150), (4, 30), (2, 129)]),
    ],
)
def test_decodes_and_drafts_of_few_heads(heads: int, page: int, requests: Requests, device: str) -> None:
    check(heads, page, requests, device)


@pytest.mark.parametrize("heads", [16, 128])
def test_halves(heads: int, device: str) -> None:
    check(heads, 64, [(1, 200)], device, F16)


@pytest.mark.parametrize("requests", [[(3, 100), (2, 2)], [(40, 70)]])
def test_tokens_before_the_queries_alone(requests: Requests, device: str) -> None:
    check(64 if len(requests) == 2 else 8, 16, requests, device, is_before=True)


def test_requests_that_are_left_out(device: str) -> None:
    check(64, 16, [(1, 20), (1, 150), (1, 90)], device, rows=[1, -1, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_long_contexts(heads: int, page: int) -> None:
    for new, dtype in ((1, BF16), (3, BF16), (4, F16)):
        check(heads, page, [(1 if new == 1 else min(new, length), length) for length in LONG], "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 20, 48, 64, 128, 256])
def test_many_requests(heads: int) -> None:
    check(heads, 64, [(1, 1 + 379 * i % 2500) for i in range(160)], "cuda")
    check(heads, 16, [(i % 5, 5 + 379 * i % 1500) for i in range(90)], "cuda")


@pytest.mark.gpu
def test_chunks_of_long_prompts() -> None:
    for heads in (16, 128):
        check(heads, 64, [(300, 1700), (150, 150), (8, 4000)], "cuda", is_before=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "requests"), [(16, 3), (16, 64), (48, 20), (128, 64)])
def test_repeated_launches_give_the_same_bits(heads: int, requests: int) -> None:
    """Blocks that are ahead of others must not change what those read."""
    lengths = [1 + 379 * (i + 5) % 2500 for i in range(requests)]
    cache, _, indptr, indices = paged_latents(LATENT + TURNED, 64, BF16, lengths)
    table = PageTable(*(x.cuda() for x in (indptr, indices, ints(lengths))))
    latents, turned = (
        randn(requests, heads, LATENT).bfloat16().cuda(),
        randn(requests, heads, TURNED, seed=1).bfloat16().cuda(),
    )
    workspace, pages, found = attend_workspace(LATENT, "cuda"), (cache.cuda(), None), []
    for _ in range(50):
        out = torch.full_like(latents, math.nan)
        latent_attend(Queries(latents, turned), pages, table, None, SCALE, (out, None), workspace)
        found.append(out)
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_replays_with_other_lengths(heads: int) -> None:
    lengths = [900, 70, 2000]
    cache, _, indptr, indices = paged_latents(LATENT + TURNED, 16, BF16, lengths)
    lens = ints([1, 1, 1]).cuda()
    table = PageTable(indptr.cuda(), indices.cuda(), lens)
    q = randn(3, heads, LATENT + TURNED, seed=5).bfloat16()
    queries = Queries(q[..., :LATENT].contiguous().cuda(), q[..., LATENT:].contiguous().cuda())
    out, workspace, pages = torch.empty_like(queries.latents), attend_workspace(LATENT, "cuda"), (cache.cuda(), None)

    def run() -> None:
        latent_attend(queries, pages, table, None, SCALE, (out, None), workspace)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    lens.copy_(ints(lengths))
    graph.replay()
    for request, length in enumerate(lengths):
        held = cache[indices[indptr[request] : indptr[request + 1]].long()].flatten(0, 2)[:length].double()
        right, _ = attended_latents(q[request : request + 1], held, LATENT, SCALE, True)
        assert float((out[request].cpu().double() - right[0]).norm() / right.norm()) < FORMATS[BF16]


def test_other_pages_have_the_kernel_of_all_gpus(emulator: EmulatorDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "driver", lambda: emulator)

    def chosen(heads: int, page: int = 16, dtype: torch.dtype = BF16, latent: int = LATENT, skew: int = 0) -> Cutting:
        turned = torch.empty(1, heads, TURNED + 8 + skew, dtype=BF16)[..., skew : TURNED + skew]
        queries = Queries(torch.empty(1, heads, latent, dtype=BF16), turned)
        return cutting(queries, torch.empty(1, 1, page, latent + TURNED, dtype=dtype), None)

    assert [chosen(heads).rows for heads in (16, 20, 48, 49, 128)] == [16, 32, 48, 64, 64]
    assert all(chosen(heads).is_sm90 for heads in (16, 49, 64))
    assert chosen(128).beside == 2
    for other in (chosen(64, page=8), chosen(64, dtype=I8), chosen(64, latent=256), chosen(64, skew=4)):
        assert other == Cutting(64)
    monkeypatch.setattr(modules, "driver", EmulatorDriver)
    assert not chosen(128).is_sm90
