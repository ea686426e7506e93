"""Attention over shared tokens, level by level, against float32 over each request's tokens; merging of states."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.cascade import (
    CascadeLevel,
    cascade_workspace,
    merge_state,
    merge_state_in_place,
    merge_states,
    paged_cascade,
    parts_of,
    plan_level,
)
from allspan.kernels.cuda.cache.pages import PageTable, Scores
from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.jit.modules import HALVES
from support.cuda_pages import coded, decoded, expected, random_pages, random_queries
from support.emulator.driver import EmulatorDriver

PAGE = 16
Groups = list[tuple[int, int]]
"""Of a level: rows, and tokens, whole pages, that they share."""


def tables(levels: list[Groups], own: list[int], device: str) -> tuple[list[PageTable], PageTable, PageTable]:
    """Of the levels, of what is each row's own, and of all tokens of each row, over the same shuffled pages."""
    lengths = [tokens for groups in levels for _, tokens in groups] + own
    *_, table = random_pages(lengths, 1, 16, PAGE, "cpu")
    lists = [table.indices[table.indptr[i] : table.indptr[i + 1]] for i in range(len(lengths))]
    whole: list[list[Tensor]] = [[] for _ in own]
    split, done = [], 0
    for groups in levels:
        mine = lists[done : done + len(groups)]
        split.append(of_lists(mine, [tokens for _, tokens in groups], device))
        rows = iter(whole)
        for pages, (count, _) in zip(mine, groups, strict=True):
            for _ in range(count):
                next(rows).append(pages)
        done += len(groups)
    mine = lists[done:]
    totals = [sum(len(pages) for pages in row) * PAGE + n for row, n in zip(whole, own, strict=True)]
    for row, pages in zip(whole, mine, strict=True):
        row.append(pages)
    return split, of_lists(mine, own, device), of_lists([torch.cat(row) for row in whole], totals, device)


def of_lists(lists: list[Tensor], lengths: list[int], device: str) -> PageTable:
    indptr = torch.tensor([0, *(len(pages) for pages in lists)]).cumsum(0).int()
    return PageTable(
        indptr.to(device), torch.cat(lists).to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
    )


def check(
    levels: list[Groups],
    own: list[int],
    heads: tuple[int, int],
    dim: int,
    device: str,
    dtype: torch.dtype | None = None,
    of: torch.dtype = torch.bfloat16,
) -> None:
    kv_heads, group = heads
    rows = len(own)
    split, mine, whole = tables(levels, own, device)
    total = sum(-(-n // PAGE) for groups in levels for _, n in groups) + sum(-(-n // PAGE) for n in own) + 3
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(total, kv_heads, PAGE, dim, generator=generator).to(of).to(device) for _ in "kv")
    cache = (keys, values) if dtype is None else coded(keys, values, dtype)
    q = random_queries(rows, kv_heads * group, dim, device, of)
    planned = []
    for table, groups in zip(split, levels, strict=True):
        plan, parts = plan_level(groups, group, kv_heads, device)
        planned.append(CascadeLevel(table, plan, parts))
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=device)
    workspace = cascade_workspace(rows, (kv_heads * group, kv_heads), dim, sum(x.parts for x in planned), device)
    workspace.states.fill_(math.nan)
    paged_cascade(q, cache, planned, mine, dim**-0.5, out, lse, workspace)
    right, right_lse = expected(q, (*decoded(cache), whole), [1] * rows, dim**-0.5, is_causal=False)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)


def test_shared_and_own_tokens_are_seen_once_each(device: str) -> None:
    check([[(5, 80)]], [17, 0, 1, 64, 33], (2, 1), 64, device)


def test_levels_some_of_whose_groups_share_nothing(device: str) -> None:
    check([[(6, 1040)], [(2, 48), (1, 0), (3, 16)]], [5, 40, 0, 17, 2, 33], (1, 7), 64, device)


def test_on_hopper_its_own_prefill_takes_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = EmulatorDriver(capability=(9, 0))
    monkeypatch.setattr(modules, "driver", lambda: emulator)
    check([[(3, 1600)], [(1, 0), (2, 16)]], [17, 0, 1], (1, 2), 64, "cpu")
    assert [launched.name for launched in emulator.launched] == ["prefill_sm90"] * 2 + ["decode", "merge_states"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_cascades_agree_with_float32(dim: int, dtype: torch.dtype | None) -> None:
    for heads, of in itertools.product(((8, 1), (2, 4), (1, 16)), HALVES):
        check([[(40, 4096)], [(10, 16), (30, 512)]], [7 * i % 300 for i in range(40)], heads, dim, "cuda", dtype, of)
        check([[(256, 8192)]], [128] * 256, heads, dim, "cuda", dtype, of)


def test_the_gpu_is_filled_by_parts_that_are_long_enough(device: str) -> None:
    if device == "cpu":  # five multiprocessors, of two blocks each
        assert [parts_of(blocks, 100000, torch.device("cpu")) for blocks in (1, 3, 5, 10, 1000)] == [8, 3, 2, 1, 1]
        assert parts_of(1, 1500, torch.device("cpu")) == 2
    assert parts_of(1, 100, torch.device(device)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_states_are_those_of_all_tokens(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(4)
    v = torch.randn(3, 4, 5, 24, generator=generator).to(dtype).to(device)
    s = (torch.randn(3, 4, 5, generator=generator) * 5).to(device)
    s[1], s[2, 1:], v[1] = -math.inf, -math.inf, math.nan
    weights = (s * math.log(2)).softmax(1).nan_to_num(0)
    right = (v.nan_to_num(0).float() * weights[..., None]).sum(1)
    right_s = (s * math.log(2)).logsumexp(1) / math.log(2)
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    merged, merged_s = merge_states(v, s)
    torch.testing.assert_close(merged.float(), right, **near)
    torch.testing.assert_close(merged_s, right_s, rtol=1e-5, atol=1e-5)
    parts = [(v[:, i].contiguous(), s[:, i].contiguous()) for i in range(4)]
    a, b = merge_state(*parts[0], *parts[1]), merge_state(*parts[2], *parts[3])
    merge_state_in_place(*a, *b)
    torch.testing.assert_close(a[0].float(), right, rtol=near["rtol"] * 2, atol=near["atol"] * 2)
    torch.testing.assert_close(a[1], right_s, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused(device: str) -> None:
    q = random_queries(2, 2, 64, device)
    keys, values, table = random_pages([10, 10], 1, 64, PAGE, device)
    plan, parts = plan_level([(2, 10)], 2, 1, device)
    assert parts == 1
    shared = PageTable(table.indptr[::2].contiguous(), table.indices, table.kv_lens[:1])
    levels, out = [CascadeLevel(shared, plan, 1)], torch.empty_like(q)
    workspace = cascade_workspace(2, (2, 1), 64, 1, device)
    with pytest.raises(ValueError, match="a window of 5 tokens"):
        paged_cascade(q, (keys, values), levels, table, Scores(0.1, 5), out, None, workspace)
    with pytest.raises(ValueError, match="workspace: not made for 2 parts"):
        paged_cascade(q, (keys, values), levels * 2, table, 0.1, out, None, workspace)
    with pytest.raises(ValueError, match=r"s: torch\.float32"):
        merge_states(q[None], torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match=r"v_b: torch\.bfloat16"):
        merge_state(q.float(), torch.zeros(2, 2, device=device), q, torch.zeros(2, 2, device=device))
