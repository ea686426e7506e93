"""Attention over latents on the CUDA kernels, in float64 on what the pages hold, and the op that writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.attention.attention import StepAttention
from allspan.kernels.cuda.attention.prefill import PrefillPlan, plan_prefill
from allspan.kernels.cuda.cache.pages import PageTable, Scores
from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.jit.modules import Kernel
from allspan.kernels.cuda.latent import expand_rule
from allspan.kernels.cuda.latent.append import latent_append
from allspan.kernels.cuda.latent.attend import merge
from allspan.kernels.cuda.latent.attend.attend import Queries, attend_workspace, latent_attend
from allspan.kernels.cuda.latent.attention import append_and_attend, latent_attention
from allspan.kernels.cuda.latent.expand import Expanded, expand_room
from allspan.kernels.cuda.latent.expand_rule import ExpandRule
from allspan.kernels.latent_tensors import LatentPages, LatentRooms, LatentSizes, LatentWeights, NewLatents
from allspan.kernels.ops import Rotation
from allspan.kernels.reference import latent as reference
from support.emulator.driver import EmulatorDriver
from support.kernel_cases import BF16, I8, randn, rotary
from support.latent_cases import F8, Requests, latent_case, latents_expanded

WHOLE = LatentSizes(512, 128, 64, 128)
FORMATS = {BF16: 5e-3, I8: 2e-2, F8: 2e-2}
"""How far the norm may be off what float64 gives of the same pages."""
LENGTHS: Requests = [(1, 1), (1, 33), (3, 214), (1, 17), (1, 300), (40, 70), (3, 3)]
LONG = [0, 1, 33, 514, 2743, 8736, 17]


def step(meta: Any, heads: int, sizes: LatentSizes, requests: Requests, device: str, made: int = 0) -> StepAttention:
    """Requests of one new token are decodes, others have tiles; keys and values are made of those with `made`."""
    workspace, table = (
        attend_workspace(sizes.latent, device),
        PageTable(meta.page_indptr, meta.page_indices, meta.kv_lens),
    )
    news, lengths = [new for new, _ in requests], [length for _, length in requests]
    rows = [sum(news[:r]) if new == 1 else -1 for r, new in enumerate(news)]

    def plan(wanted: Callable[[int], bool]) -> PrefillPlan:
        tiled = plan_prefill([new if wanted(new) else 0 for new in news], lengths, 1, device)
        return replace(tiled, qo_indptr=meta.qo_indptr, queries=sum(news))

    kept = plan(lambda new: new > 1 and not 0 < made <= new)
    decodes = replace(table, rows=torch.tensor(rows, dtype=torch.int32, device=device))
    if rows == sorted(rows, key=lambda row: (row < 0, row)):  # as the engine has them
        first = sum(row >= 0 for row in rows)
        decodes = PageTable(meta.page_indptr[: first + 1], meta.page_indices, meta.kv_lens[:first])
    prefills = (table, kept) if len(kept.tiles) else None
    expanded = None
    if made:
        lens = [length if new >= made else 0 for new, length in requests]
        indptr = torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32, device=device)
        room = expand_room(ExpandRule(sizes, heads, sum(lens) + 5, 1), device)
        expanded = Expanded(table, plan(lambda new: new >= made), indptr, sum(lens) + 5, room)
    return StepAttention(decodes, prefills, Scores(meta.scale), workspace, expanded=expanded)


def moved(arguments: list[Any], device: str) -> list[Any]:
    q, weights, cache, scales, meta, *rooms = arguments
    halves = [each.bfloat16().to(device) for each in (q, *weights, *rooms)]
    meta = type(meta)(*(each.to(device) if isinstance(each, Tensor) else each for each in vars(meta).values()))
    scales = None if scales is None else scales.to(device)
    return [halves[0], LatentWeights(*halves[1:3]), cache.to(device), scales, meta, *halves[3:]]


def check(
    heads: int,
    sizes: tuple[int, int, int, int],
    page: int,
    dtype: torch.dtype,
    requests: Requests,
    on: str,
    made: int = 0,
) -> None:
    arguments = moved(latent_case(heads, sizes, page, dtype, requests), on)
    meta = step(arguments[4], heads, LatentSizes(*sizes), requests, on, made)
    latent_attention(*arguments[:4], meta, *arguments[5:])
    expected, found = latents_expanded(arguments), arguments[-1].double()
    assert float((found - expected).norm() / expected.norm()) < FORMATS[dtype]
    assert not meta.workspace.counters.any()


@pytest.mark.parametrize("dtype", FORMATS, ids=["bfloat16", "int8", "e4m3"])
@pytest.mark.parametrize("heads", [16, 20, 64])
def test_attention_over_latents_is_that_over_keys_and_values(heads: int, dtype: torch.dtype, device: str) -> None:
    sizes = (64, 16, 16, 16) if heads == 20 else (80, 24, 32, 40)
    check(heads, sizes, {16: 16, 20: 32, 64: 64}[heads], dtype, LENGTHS, device)


def test_sizes_of_released_models(device: str) -> None:
    check(16, WHOLE, 64, BF16, [(1, 33), (2, 70), (1, 200)], device)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("dtype", FORMATS, ids=["bfloat16", "int8", "e4m3"])
def test_long_contexts(heads: int, page: int, dtype: torch.dtype) -> None:
    for new in (1, 3):
        check(heads, WHOLE, page, dtype, [(min(new, length), length) for length in LONG], "cuda")


@pytest.mark.parametrize("dtype", FORMATS, ids=["bfloat16", "int8", "e4m3"])
def test_what_is_appended_is_that_of_the_reference(dtype: torch.dtype, device: str) -> None:
    n, heads, key, latent, rot = 19, 5, 24, 48, 16
    q, turned, positions, cos_sin = rotary(n, heads, 1, rot, rot)
    ours = torch.cat((randn(n, heads, key, seed=2), q), 2).bfloat16()
    kv = torch.cat((randn(n, latent, seed=3), turned[:, 0]), 1).bfloat16()
    weight, q_scales = randn(latent, seed=4), 1 + torch.arange(len(cos_sin)) / 7
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(n))[:n].int()
    slots[3] = -1
    cache, scales = torch.zeros(4, 1, 16, latent + rot, dtype=dtype), None
    if dtype is not BF16:
        scales = torch.zeros(4, 1, 2, 16)
    rotation = Rotation(positions, cos_sin, q_scales)
    found = [None if x is None else x.clone().to(device) for x in (ours, kv, weight, *rotation, cache, scales, slots)]
    latent_append(found[0], found[1], found[2], 1e-6, Rotation(*found[3:6]), *found[6:])
    wide_q, wide_kv = ours.float(), kv.float()
    plain = torch.zeros(5, 1, 16, latent + rot)
    reference.latent_append(wide_q, wide_kv, weight, 1e-6, rotation, plain, None, slots.where(slots >= 0, 64))
    torch.testing.assert_close(found[0].cpu().float(), wide_q, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(found[1].cpu().float(), wide_kv, rtol=2e-2, atol=1e-2)
    held = found[6].cpu().float()
    if scales is not None:
        zero, scale = found[7].cpu()[..., None].unbind(2)
        held = (held - zero) * scale
    torch.testing.assert_close(held, plain[:4], rtol=0.07 if dtype is F8 else 2e-2, atol=3e-2)


@pytest.mark.parametrize("least", [0, 999])
def test_a_request_without_tokens_has_zeros(device: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the last block of a tile merges its parts, or blocks of their own do."""
    monkeypatch.setattr(merge, "LEAST_PIECES", least)
    q, _weights, cache, _, meta, *_ = moved(latent_case(16, (64, 16, 16, 16), 16, BF16, [(1, 1), (1, 40)]), device)
    meta.kv_lens[0] = 0
    latents = torch.cat([q, q, q], 2)[..., :64].contiguous()
    out, lse = torch.full_like(latents, torch.nan), torch.full((2, 16), torch.nan, device=device)
    table = PageTable(meta.page_indptr, meta.page_indices, meta.kv_lens)
    queries = Queries(latents, q[..., 16:])
    latent_attend(queries, (cache, None), table, None, meta.scale, (out, lse), attend_workspace(64, device))
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()
    rows = cache[meta.page_indices[1:].long()].flatten(0, 2)[:40].double()
    scores = torch.cat((latents, q[..., 16:]), 2)[1].double() @ rows.T * meta.scale
    torch.testing.assert_close(lse[1].double(), scores.logsumexp(1) / np.log(2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out[1].double(), scores.softmax(1) @ rows[:, :64], rtol=2e-2, atol=1e-2)


SEVERAL: Requests = [(1, 60), (150, 190), (3, 214), (2, 2), (33, 33), (7, 71), (64, 129), (34, 97), (40, 41)]


@pytest.mark.parametrize("made", [2, 33], ids=["of all", "of some"])
@pytest.mark.parametrize("dtype", FORMATS, ids=["bfloat16", "int8", "e4m3"])
def test_keys_and_values_are_made(dtype: torch.dtype, made: int, device: str) -> None:
    """Of all that many new tokens see, beside requests that stay latents."""
    for heads, sizes in ((4, (64, 16, 16, 16)), (3, (48, 32, 16, 48))):
        check(heads, sizes, 16, dtype, SEVERAL, device, made)


@pytest.mark.parametrize("at_once", [1 << 18, 300], ids=["at once", "head by head"])
def test_keys_and_values_are_made_on_hopper(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for those of all heads, some come after others."""
    hopper = EmulatorDriver(capability=(9, 0))
    monkeypatch.setattr(modules, "driver", lambda: hopper)
    monkeypatch.setattr(expand_rule, "_AT_ONCE", at_once)
    monkeypatch.setattr(expand_rule, "_LEAST_HEADS", 1)
    check(2, (64, 128, 64, 128), 16, BF16, [(1, 60), (65, 190), (140, 140), (2, 66)], "cpu", made=65)
    launched = [each for each in hopper.launched if ("HEAD_DIM", 192) in each.defines]
    assert len(launched) == (1 if at_once > 300 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("dtype", FORMATS, ids=["bfloat16", "int8", "e4m3"])
def test_long_prompts(dtype: torch.dtype, page: int) -> None:
    for made in (2, 100):
        for requests in (
            [(1, 300), (700, 700), (2743, 2743)],
            [(1, 300), (300, 1700), (8, 8736), (40, 40), (999, 9000)],
        ):
            check(16, WHOLE, page, dtype, requests, "cuda", made)


@pytest.mark.gpu
@pytest.mark.parametrize("before", [0, 1, 63, 64, 65, 9000])
def test_prompts_of_many_heads_that_go_on(before: int) -> None:
    """Of 128 heads few are there at once."""
    check(128, WHOLE, 64, BF16, [(1, 300), (300, 300 + before), (33, 70)], "cuda", 33)


TWO_DECODES: Requests = [(1, 900), (1, 33)]
MORE_DECODES: Requests = [(1, 900), (1, 1), (1, 400)]


def who_merges(launched: Sequence[Kernel]) -> list[int]:
    """Of each product with what makes values, whether it merges."""
    return [dict(each.defines)["MERGES"] for each in launched if each.name == "latent_product"][1::2]


@pytest.mark.parametrize("requests", [TWO_DECODES, MORE_DECODES], ids=["two", "more"])
@pytest.mark.parametrize("heads", [3, 16, 20, 72])
def test_the_product_behind_merges_parts_of_a_few_decodes(
    heads: int, requests: Requests, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = EmulatorDriver()
    if device == "cpu":
        monkeypatch.setattr(modules, "driver", lambda: driver)
    check(heads, (64, 16, 16, 24), 16, BF16, requests, device)
    if device == "cpu":
        assert who_merges(driver.launched) == [1]


@pytest.mark.parametrize("dtype", FORMATS, ids=["bfloat16", "int8", "e4m3"])
@pytest.mark.parametrize(
    ("requests", "made"),
    [([(1, 90), (1, 1), (1, 33), (1, 64)], 0), ([(1, 90), (3, 33)], 0), ([(1, 90), (3, 33)], 3)],
    ids=["few", "prompt", "made"],
)
def test_what_is_appended_with_attention_is_what_is_before_it(
    requests: Requests, made: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that lie apart; with a few decodes the append is part of another kernel, more rows than heads."""
    driver = EmulatorDriver()
    if device == "cpu":
        monkeypatch.setattr(modules, "driver", lambda: driver)
    heads, sizes = 3, LatentSizes(64, 16, 16, 24)
    latent, rot = sizes.latent, sizes.rot
    q, weights, cache, scales, meta, *rooms = moved(latent_case(heads, sizes, 16, dtype, requests), device)
    n, last = len(q), [length - 1 for new, length in requests for length in range(length - new + 1, length + 1)]
    pages = [r for r, (new, _) in enumerate(requests) for _ in range(new)]
    table = meta.page_indices[meta.page_indptr.long()[pages] + torch.tensor(last, device=device) // 16].tolist()
    slots = torch.tensor([p * 16 + at % 16 for p, at in zip(table, last, strict=True)]).int()
    positions, cos_sin = torch.tensor(last).int(), randn(100, rot, seed=6)
    rotation = Rotation(positions.to(device), cos_sin.to(device))
    norm, kv = randn(latent, seed=7).to(device), randn(n, latent + rot, seed=8)
    found = []
    for is_one in (True, False):
        both = torch.cat((q.cpu().flatten(1).float(), kv), 1).bfloat16().to(device)
        own_q, new = both[:, : q[0].numel()].view(q.shape), both[:, q[0].numel() :]
        own, its = cache.clone(), None if scales is None else scales.clone()
        out = torch.full_like(rooms[-1], torch.nan)
        rest = step(meta, heads, sizes, requests, device, made)
        if is_one:
            given = NewLatents(new, norm, 1e-6, slots.to(device))
            append_and_attend(
                own_q, given, rotation, weights, LatentPages(own, its), rest, LatentRooms(*rooms[:2]), out
            )
        else:
            latent_append(own_q, new, norm, 1e-6, rotation, own, its, slots.to(device))
            latent_attention(own_q, weights, own, its, rest, *rooms[:2], out)
        found.append([both, own.view(torch.uint8), its, out])
    for one, other in zip(*found, strict=True):
        assert one is other is None or torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    assert not found[0][-1].isnan().any()
    if device == "cpu":
        names = [each.name for each in driver.launched]
        assert names.count("absorb_append") == int(len(requests) == 4), names


@pytest.mark.parametrize("requests", [TWO_DECODES, MORE_DECODES], ids=["two", "more"])
@pytest.mark.parametrize(("heads", "name"), [(16, "attend_few_sm90"), (48, "attend_few_sm90"), (128, "attend_sm90")])
def test_a_few_decodes_on_hopper(heads: int, name: str, requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = EmulatorDriver(capability=(9, 0))
    monkeypatch.setattr(modules, "driver", lambda: hopper)
    check(heads, (512, 16, 64, 16), 16, BF16, requests, "cpu")
    assert name in {each.name for each in hopper.launched}
    assert who_merges(hopper.launched) == [int(len(requests) == 2 or heads == 128)]


def test_tiles_of_no_request_are_left_out(device: str) -> None:
    """As steps have them whose sizes a graph has fixed."""
    requests: Requests = [(40, 70), (3, 90)]
    arguments = moved(latent_case(16, (64, 16, 16, 16), 16, BF16, requests), device)
    meta = step(arguments[4], 16, LatentSizes(64, 16, 16, 16), requests, device)
    assert meta.prefills is not None
    table, plan = meta.prefills
    padded = replace(plan, tiles=torch.cat((plan.tiles, torch.full_like(plan.tiles, -1))))
    latent_attention(*arguments[:4], replace(meta, prefills=(table, padded)), *arguments[5:])
    expected, found = latents_expanded(arguments), arguments[-1].double()
    assert float((found - expected).norm() / expected.norm()) < FORMATS[BF16]
