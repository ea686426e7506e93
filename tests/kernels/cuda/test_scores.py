"""What models do to attention's logits, alone and together, in every kernel and every format of pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.cascade import CascadeLevel, cascade_workspace, paged_cascade, plan_level
from allspan.kernels.cuda.attention.decode import decode_workspace, paged_decode
from allspan.kernels.cuda.attention.prefill import paged_prefill, plan_prefill
from allspan.kernels.cuda.attention.prefill_sm90 import paged_prefill_sm90
from allspan.kernels.cuda.cache.pages import Cache, PageTable, Scores
from allspan.kernels.cuda.jit import modules
from support.cuda_pages import coded, decoded, expected, random_pages, random_queries
from support.emulator.driver import EmulatorDriver

GPU = pytest.mark.gpu
HEADS = 6
SLOPES = torch.tensor([2.0 ** -(i % 4 + 1) for i in range(HEADS)])
SINKS = torch.tensor([-3.0, 0.0, 1.5, 4.0, 20.0, -math.inf])
CASES = {
    "window": Scores(0.1, window_left=40),
    "own token": Scores(0.1, window_left=0),
    "cap": Scores(0.7, soft_cap=2.0),
    "slopes": Scores(0.1, slopes=SLOPES),
    "sinks": Scores(0.1, sinks=SINKS),
    "cap and window": Scores(0.7, 33, 2.0),
    "slopes and sinks": Scores(0.1, slopes=SLOPES, sinks=SINKS),
    "all": Scores(0.7, 90, 2.0, SLOPES, SINKS),
}
FORMATS = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "uint4": torch.uint8,
    "float8": torch.float8_e4m3fn,
}  # fmt: skip
FEATURES = ("window-bfloat16", "slopes-bfloat16", "sinks-bfloat16")
TOGETHER = ("all-bfloat16", "all-int8", "all-uint4")


def over(cases: dict[str, Scores], forms: Iterable[str], *emulated: str) -> pytest.MarkDecorator:
    """Parameters scores and form: all on a GPU, those named emulated, as kernels take seconds to compile."""
    every = {f"{name}-{form}": (scores, form) for name, scores in cases.items() for form in forms}
    marked = [pytest.param(*case, id=name, marks=[] if name in emulated else [GPU]) for name, case in every.items()]
    return pytest.mark.parametrize(("scores", "form"), marked)


def on(device: str, scores: Scores) -> Scores:
    held = [None if x is None else x.to(device) for x in (scores.slopes, scores.sinks)]
    return replace(scores, slopes=held[0], sinks=held[1])


def pages(lengths: list[int], kv_heads: int, dim: int, form: str, device: str) -> tuple[Cache, PageTable]:
    dtype = FORMATS[form]
    of = torch.float16 if form == "float16" else torch.bfloat16
    keys, values, table = random_pages(lengths, kv_heads, dim, 16, device, of)
    return ((keys, values) if form in ("bfloat16", "float16") else coded(keys, values, dtype)), table


def queries_of(count: int, dim: int, form: str, device: str) -> Tensor:
    return random_queries(count, HEADS, dim, device, torch.float16 if form == "float16" else torch.bfloat16)


def near(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[0].float(), right[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[1], right[1], rtol=1e-3, atol=3e-3)


def widened(cache: Cache) -> tuple[Tensor, Tensor]:
    """What prefill multiplies: codes with scales as bfloat16."""
    held = decoded(cache)
    return held if len(cache) == 2 else (held[0].bfloat16(), held[1].bfloat16())


def unwritten(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=q.device)


@over(CASES, FORMATS, *FEATURES, *TOGETHER)
def test_decode(scores: Scores, form: str, device: str) -> None:
    """Requests that one block sees whole, that several share, and one of no tokens."""
    lengths, dim, scores = [1, 41, 0, 700], 64, on(device, scores)
    cache, table = pages(lengths, 2, dim, form, device)
    q = queries_of(len(lengths), dim, form, device)
    out, lse = unwritten(q)
    paged_decode(q, cache, table, scores, out, lse, decode_workspace(len(lengths), 2, dim, device))
    near((out, lse), expected(q, (*decoded(cache), table), [1] * len(lengths), scores, is_causal=True))
    assert not out[2].any()
    assert lse[2].isneginf().all()


@over(CASES, FORMATS, *FEATURES, *TOGETHER)
def test_prefill(scores: Scores, form: str, device: str) -> None:
    queries, lengths, dim, scores = [70, 3, 0], [200, 3, 5], 64, on(device, scores)
    cache, table = pages(lengths, 3, dim, form, device)
    q = queries_of(sum(queries), dim, form, device)
    for is_causal in (True, False):
        out, lse = unwritten(q)
        paged_prefill(q, cache, table, plan_prefill(queries, lengths, 2, device), scores, is_causal, out, lse)
        near((out, lse), expected(q, (*widened(cache), table), queries, scores, is_causal))


@pytest.fixture
def hopper(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if device == "cpu":
        emulator = EmulatorDriver(capability=(9, 0))
        monkeypatch.setattr(modules, "driver", lambda: emulator)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    return device


@over(CASES, ("bfloat16", "float16"), "window-bfloat16", "all-bfloat16")
def test_prefill_on_hopper(scores: Scores, form: str, hopper: str) -> None:
    queries, lengths, dim, scores = [100, 3], [300, 40], 64, on(hopper, scores)
    cache, table = pages(lengths, 3, dim, form, hopper)
    q = queries_of(sum(queries), dim, form, hopper)
    for is_causal in (True, False):
        out, lse = unwritten(q)
        paged_prefill_sm90(q, cache, table, plan_prefill(queries, lengths, 2, hopper), scores, is_causal, out, lse)
        near((out, lse), expected(q, (*decoded(cache), table), queries, scores, is_causal))


def cascade(scores: Scores, form: str, device: str, shared: Sequence[int] = (1040, 32)) -> None:
    """Two levels, all rows in the first, then two of four; a row without a token of its own."""
    own, dim, tokens = [17, 0, 1, 64], 64, list(shared)
    cache, table = pages([*tokens, *own], 2, dim, form, device)
    lists = [table.indices[table.indptr[i] : table.indptr[i + 1]] for i in range(6)]
    groups = [[(4, tokens[0])], [(2, tokens[1]), (2, 0)]]
    held = [[lists[0]], [lists[1], lists[1][:0]]]
    levels = []
    for of_level, mine in zip(groups, held, strict=True):
        plan, parts = plan_level(of_level, HEADS // 2, 2, device)
        levels.append(CascadeLevel(joined(mine, [n for _, n in of_level]), plan, parts))
    whole = [[lists[0], *([lists[1]] if i < 2 else []), lists[2 + i]] for i in range(4)]
    totals = [tokens[0] + (tokens[1] if i < 2 else 0) + n for i, n in enumerate(own)]
    q = queries_of(4, dim, form, device)
    out, lse = unwritten(q)
    workspace = cascade_workspace(4, (HEADS, 2), dim, sum(level.parts for level in levels), device)
    paged_cascade(q, cache, levels, joined(lists[2:], own), scores, out, lse, workspace)
    table = joined([torch.cat(row) for row in whole], totals)
    near((out, lse), expected(q, (*widened(cache), table), [1] * 4, scores, is_causal=True))


def joined(lists: Sequence[Tensor], lengths: list[int]) -> PageTable:
    indptr = torch.tensor([0, *(len(each) for each in lists)]).cumsum(0).int()
    device = lists[0].device
    return PageTable(indptr.to(device), torch.cat([*lists]), torch.tensor(lengths, dtype=torch.int32, device=device))


SHARED = {name: scores for name, scores in CASES.items() if scores.window_left < 0} | {
    "all": Scores(0.7, -1, 2.0, SLOPES, SINKS)
}


@over(SHARED, FORMATS, "sinks-bfloat16", "all-bfloat16", "all-int8")
def test_cascades(scores: Scores, form: str, device: str) -> None:
    """Flat slopes, so that tokens of every level count."""
    flat = None if scores.slopes is None else scores.slopes / 64
    cascade(on(device, replace(scores, slopes=flat)), form, device)


@over(SHARED, ("bfloat16", "float16"), "all-bfloat16")
def test_cascades_on_hopper(scores: Scores, form: str, hopper: str) -> None:
    flat = None if scores.slopes is None else scores.slopes / 64
    cascade(on(hopper, replace(scores, slopes=flat)), form, hopper)


def test_what_lies_behind_a_window_is_not_read(hopper: str) -> None:
    """Pages that a request gave back may be another's: their places in the table say anything, as may the rest of the
    page in which the window begins."""
    window, lengths, dim = 50, [300, 517], 64
    keys, values, table = random_pages(lengths, 3, dim, 16, hopper)
    queries = [37, 2]
    seen = [length - count - window for length, count in zip(lengths, queries, strict=True)]
    for first, start in zip(seen, table.indptr.tolist(), strict=False):
        page = table.indices[start + first // 16].long()
        keys[page, :, : first % 16] = math.nan
        values[page, :, : first % 16] = math.nan
        table.indices[start : start + first // 16] = 10**8
    q, scores = random_queries(sum(queries), HEADS, dim, hopper), Scores(0.1, window)
    plan = plan_prefill(queries, lengths, 2, hopper)
    clean = keys.nan_to_num(0), values.nan_to_num(0), replace(table, indices=table.indices % 10**8)
    right = expected(q, clean, queries, scores, is_causal=True)
    for run in (paged_prefill, paged_prefill_sm90):
        out, lse = unwritten(q)
        run(q, (keys, values), table, plan, scores, True, out, lse)
        near((out, lse), right)
    last = q[[queries[0] - 1, sum(queries) - 1]].contiguous()
    out, lse = unwritten(last)
    paged_decode(last, (keys, values), table, scores, out, lse, decode_workspace(2, 3, dim, hopper))
    near((out, lse), tuple(x[[queries[0] - 1, sum(queries) - 1]] for x in right))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["int8", "uint4"])
def test_scales_of_tokens_to_come_may_be_anything(form: str, device: str) -> None:
    """A page's last places hold what its last user left."""
    lengths, dim = [13, 70], 64
    cache, table = pages(lengths, 2, dim, form, device)
    right = expected(q := queries_of(2, dim, form, device), (*decoded(cache), table), [1, 1], 0.1, is_causal=True)
    for length, end in zip(lengths, table.indptr[1:].tolist(), strict=True):
        for scales in cache[2:]:
            assert scales is not None
            scales[table.indices[end - 1].long(), :, :, length % 16 :] = math.nan
    out, lse = unwritten(q)
    paged_decode(q, cache, table, 0.1, out, lse, decode_workspace(2, 2, dim, device))
    near((out, lse), right)
    out, lse = unwritten(q)
    paged_prefill(q, cache, table, plan_prefill([1, 1], lengths, 3, device), 0.1, True, out, lse)
    near((out, lse), right)


def test_values_of_another_shape_or_type_are_refused(device: str) -> None:
    keys, values, table = random_pages([10], 3, 64, 16, device)
    q = random_queries(1, HEADS, 64, device)
    for name, wrong in {"slopes": torch.zeros(3), "sinks": torch.zeros(HEADS, dtype=torch.float64)}.items():
        scores = replace(Scores(0.1), **{name: wrong.to(device)})
        for run in (
            lambda scores: paged_decode(
                q, (keys, values), table, scores, torch.empty_like(q), None, decode_workspace(1, 3, 64, device)
            ),
            lambda scores: paged_prefill(
                q, (keys, values), table, plan_prefill([1], [10], 2, device), scores, True, torch.empty_like(q), None
            ),
        ):
            with pytest.raises(ValueError, match=name):
                run(scores)


@pytest.mark.gpu
def test_a_captured_graph_serves_windows_past_their_pages() -> None:
    """Lengths that grow by pages, whose places in the table before the window are no pages any more."""
    keys, values, table = random_pages([400, 90], 3, 64, 16, "cuda")
    lens = table.kv_lens.clone()
    table.kv_lens.copy_(torch.tensor([10, 3]))
    q, scores = random_queries(2, HEADS, 64, "cuda"), Scores(0.1, 40, 2.0, SLOPES.cuda(), SINKS.cuda())
    out, workspace = torch.empty_like(q), decode_workspace(2, 3, 64, "cuda")
    paged_decode(q, (keys, values), table, scores, out, None, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode(q, (keys, values), table, scores, out, None, workspace)
    for ahead in (300, 77, 1, 0):
        table.kv_lens.copy_((lens - ahead).clamp(min=1))
        graph.replay()
        right, _ = expected(q, (keys, values, table), [1, 1], scores, is_causal=True)
        torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=1e-2)
