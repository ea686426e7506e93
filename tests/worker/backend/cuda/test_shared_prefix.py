"""When decode takes what rows share once for all of them, and how that is cut."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.kernels.cuda.attention.attention import StepAttention, attention
from allspan.kernels.cuda.attention.cascade import CascadeLevel, cascade_workspace
from allspan.kernels.cuda.attention.cascade_rule import MOST_GROUPS, TILE_TOKEN, CascadeRule, tile_token
from allspan.kernels.cuda.attention.decode import decode_workspace
from allspan.kernels.cuda.attention.prefill import PrefillPlan
from allspan.kernels.cuda.cache.pages import PageTable, Scores
from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.jit.modules import Gpu
from allspan.worker.backend.cuda.attention import CudaMetadata
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.rope import RotarySpec
from allspan.worker.models.shard import make_shard
from allspan.worker.step.buffer_sizes import ModelLimits
from support.cuda_pages import expected, random_queries
from support.emulator.driver import EmulatorDriver

PAGE = 16
CPU = torch.device("cpu")


class H200:
    """Says what it is; launches nothing."""

    def gpu(self, device: torch.device) -> Gpu:
        return Gpu(132, 232_448, (9, 0))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "driver", H200)


def rule(kv_heads: int = 4, group: int = 7, most_tokens: int = 32768) -> CascadeRule:
    return CascadeRule(kv_heads, group, 128, TILE_TOKEN["wgmma"], most_tokens, CPU)


def together(rows: int, tokens: int) -> np.ndarray:
    """What each of so many rows has in common with the next."""
    return np.array([tokens] * (rows - 1) + [0], np.int32)


def groups_of(common: np.ndarray, rows: int, of: CascadeRule) -> list[tuple[int, int]] | None:
    found = of.choose(common, rows)
    return None if found is None else [(int(n), int(t)) for n, t in zip(found.rows, found.tokens, strict=True) if n]


@pytest.mark.usefixtures("h200")
def test_it_pays_for_many_rows_and_long_prefixes() -> None:
    assert groups_of(together(64, 8192), 64, rule()) == [(64, 8192)]
    assert groups_of(together(256, 32768), 256, rule(32, 1)) == [(256, 32768)]
    assert groups_of(together(64, 64), 64, rule()) is None, "two launches cost more"
    assert groups_of(together(3, 32768), 4, rule()) is None, "so few rows find it in the caches"
    assert not rule().may_pay(4)
    assert rule().may_pay(64)
    assert not rule(most_tokens=128).may_pay(256)


@pytest.mark.usefixtures("h200")
def test_rows_without_anything_in_common_stay_apart() -> None:
    assert rule().choose(np.zeros(64, np.int32), 64) is None
    common = np.concatenate((together(40, 8192), together(1, 0), together(2, 16), together(20, 4096)))
    # Two rows do not gain what a tile costs.
    assert groups_of(common, 72, rule(8, 4)) == [(40, 8192), (3, 0), (20, 4096), (9, 0)]


@pytest.mark.usefixtures("h200")
def test_a_prefix_of_all_does_not_hide_those_within_it() -> None:
    common = np.concatenate((together(40, 16384), together(40, 16384)))
    common[39] = 512
    assert groups_of(common, 80, rule(8, 4)) == [(40, 16384), (40, 16384)]
    common[39] = 16000
    assert groups_of(common, 80, rule(8, 1)) == [(80, 16000)]


@pytest.mark.usefixtures("h200")
def test_no_more_groups_than_graphs_have_room_for() -> None:
    common = np.concatenate([together(16, 1024 * (1 + i)) for i in range(12)])
    groups = groups_of(common, 192, rule(8, 4))
    assert groups == [(64, 0), *((16, 1024 * (1 + i)) for i in range(4, 12))]
    assert len(groups) == 1 + MOST_GROUPS


rows_in_common = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 512).map(lambda pages: pages * PAGE)), min_size=1, max_size=12
)


@settings(max_examples=100, deadline=None)
@given(rows_in_common, st.integers(0, 40), st.sampled_from([(4, 7), (1, 16), (32, 1)]))
def test_whatever_is_chosen_fits_and_covers_each_row_once(
    days: list[tuple[int, int]], padding: int, heads: tuple[int, int]
) -> None:
    before, modules.driver = modules.driver, H200  # type: ignore[assignment]
    try:
        of = rule(*heads)
        common = np.concatenate([together(*day) for day in days])
        rows = len(common) + padding
        found = of.choose(common, rows)
        most_groups, most_tiles = of.sizes(rows)
    finally:
        modules.driver = before
    if found is None:
        return
    assert (len(found.rows), len(found.tiles), len(found.qo_indptr)) == (most_groups, most_tiles, most_groups + 1)
    assert found.rows.sum() == rows == found.qo_indptr[-1]
    covered = set()
    for request, row0 in found.tiles.tolist():
        if request >= 0:
            first = found.qo_indptr[request] * heads[1]
            covered |= set(range(first + row0, first + min(row0 + 128, found.rows[request] * heads[1])))
    assert covered == set(range(rows * heads[1]))
    for first, count, tokens in zip(found.qo_indptr, found.rows, found.tokens, strict=False):
        assert not tokens or (common[first : first + count - 1] >= tokens).all()


@pytest.mark.usefixtures("h200")
def test_the_kernel_that_runs_is_the_one_that_is_counted_with() -> None:
    assert tile_token("bfloat16", 16, 128, CPU) == TILE_TOKEN["wgmma"]
    assert tile_token("bfloat16", 16, 256, CPU) == TILE_TOKEN["mma"]
    assert tile_token("uint4", 16, 128, CPU) == TILE_TOKEN["codes"]


@pytest.mark.usefixtures("h200")
def test_ranks_with_other_heads_decide_alike() -> None:
    cache, limits = CacheSpec(PAGE, 1, 2, 128, "bfloat16"), ModelLimits(64, 64, 4096)
    block = Gqa(9, 3, 128, RotarySpec(theta=1e4))
    one, other = (block.on_rank(make_shard(rank, 2)) for rank in range(2))
    first, second = (CudaMetadata(heads, cache, limits, CPU) for heads in (one, other))
    assert first.cascade_rule is not None
    assert first.cascade_rule == second.cascade_rule
    without = CudaMetadata(one, cache, replace(limits, uses_cascades=False), CPU)
    assert without.cascade_rule is None


def test_uneven_heads_and_padding_see_shared_and_own_tokens_once_each(device: str) -> None:
    check_step(device)


def test_on_hopper_tiles_of_none_are_passed_over_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = EmulatorDriver(capability=(9, 0))
    monkeypatch.setattr(modules, "driver", lambda: emulator)
    check_step("cpu")
    assert [launched.name for launched in emulator.launched] == ["prefill_sm90", "decode", "merge_states"]


def check_step(device: str) -> None:
    lists = [[7, 2, 9, 4], [7, 2, 9, 5], [7, 2, 9], [1], [3, 8], [3, 8, 6]]
    lengths = np.array([60, 50, 48, 9, 32, 40, 0, 0], np.int32)
    common = np.array([48, 48, 0, 0, 32, 0], np.int32)
    indptr = np.cumsum([0, *map(len, lists), 0, 0], dtype=np.int32)
    indices = np.concatenate(lists).astype(np.int32)
    of = CascadeRule(2, 3, 64, 0.1, 1024, torch.device(device))
    best = of.cut([(3, 48), (1, 0), (2, 32), (2, 0)], 8)
    assert len(common) + 2 == best.rows.sum()

    def on_device(*ints: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(x.copy()).to(device) for x in ints]

    (pages, first_heads, tiles, qo_indptr) = on_device(
        indices, np.array([0, 1, 4], np.int32), best.tiles, best.qo_indptr
    )
    level, own = (
        PageTable(starts, pages, counts, first_heads=first_heads, most_heads=3)
        for starts, counts in (on_device(*table) for table in best.tables(indptr, lengths, PAGE))
    )
    q = random_queries(8, 4, 64, device)
    keys, values = (
        random_queries(10 * PAGE, 2, 64, device).view(10, PAGE, 2, 64).transpose(1, 2).contiguous() + i
        for i in range(2)
    )
    workspace = cascade_workspace(8, (4, 2), 64, 2, device)
    workspace.states.fill_(math.nan)
    plan = CascadeLevel(level, PrefillPlan(tiles, qo_indptr, 8, 3), 2)
    meta = StepAttention(own, None, Scores(0.1), decode_workspace(8, 2, 64, device), (plan, workspace))
    out = torch.full_like(q, math.nan)
    attention(q, keys, values, None, None, None, meta, out)
    whole = PageTable(*on_device(indptr, indices, lengths), first_heads=first_heads, most_heads=3)
    right, _ = expected(q, (keys, values, whole), [1] * 8, 0.1, is_causal=False)
    torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=1e-2)
