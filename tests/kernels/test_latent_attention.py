"""Attention over latents against the expanded form, in float64 on what the pages hold, and the op that writes them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.latent_tensors import LatentWeights
from allspan.kernels.ops import Rotation
from allspan.kernels.table import backends, op_set
from support.kernel_cases import BF16, F32, I8, Meta, ints, randn, rotary
from support.latent_cases import F8, QUANTISED_PAGES, latent_case, latents_absorbed, latents_expanded

FORMATS = {F32: 2e-6, BF16: 5e-3, I8: 5e-3, F8: 5e-3}
"""How far the norm may be off what float64 gives of the same pages."""
LONG_FORMATS = {BF16: 5e-3, F8: 2e-2}
RELEASED = (512, 128, 64, 128)
NATIVE = [name for name in backends() if name.startswith("cpu/")]
LENGTHS = [(1, 1), (1, 33), (3, 514), (1, 17), (0, 0), (70, 70), (3, 2743)]
"""(new tokens, tokens in the cache) of each request."""
SHAPES = {
    "few heads": (5, (64, 16, 16, 16)),
    "few heads of whole vectors": (5, (96, 16, 32, 16)),
    "heads that nearly fill a vector": (11, (96, 16, 32, 16)),
}
"""Heads, and sizes as latent_case() takes them: the kernels that one query alone may take."""


def same(ours: Tensor, other: Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", FORMATS, ids=["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("backend", backends())
def test_absorbed_attention_is_expanded_attention(backend: str, dtype: torch.dtype) -> None:
    most = FORMATS[dtype] if backend in ("cpu/avx512_bf16", "cpu/amx") else FORMATS[F32]
    for heads, sizes, page_size in ((16, (64, 32, 16, 24), 16), (5, (40, 9, 6, 11), 32), (3, (32, 16, 0, 16), 64)):
        for threads in (1, 3):
            arguments = latent_case(heads, sizes, page_size, dtype, LENGTHS)
            op_set(backend, threads).latent_attention(*arguments)
            expected = latents_expanded(arguments)
            assert float((arguments[-1] - expected).norm() / expected.norm()) < most, (heads, threads)


@pytest.mark.parametrize("backend", backends())
def test_rows_of_eight_bit_floats_have_a_scale_and_keep_what_e4m3_keeps(backend: str) -> None:
    rows = torch.cat((randn(6, 1, 40), torch.zeros(1, 1, 40), torch.full((1, 1, 40), torch.nan)))
    rows[1] *= 1e6
    rows[2, 0, 7] = torch.inf
    cache, scales = torch.zeros(1, 1, 16, 40).to(F8), torch.zeros(1, 1, 2, 16)
    op_set(backend).append_kv(rows, rows, cache, cache, scales, scales, torch.arange(8).int())
    reference = torch.zeros_like(cache)
    op_set("reference").append_kv(rows, rows, reference, reference, scales.clone(), scales, torch.arange(8).int())
    assert same(cache, reference)
    zero, scale = scales[0, 0, :, :8]
    held = cache[0, 0, :8].float() * scale[:, None]
    sound = [0, 1, 3, 4, 5, 6]
    assert not zero.any()
    assert held[[2, 7]].isnan().all()
    torch.testing.assert_close(scale[sound], (rows[sound, 0].abs().amax(1) / 448).clamp(min=1e-5))
    off = (held[sound] - rows[sound, 0]).abs()
    assert (off <= (rows[sound, 0].abs() / 16).maximum(scale[sound, None] / 1024) * 1.001).all()


def test_heads_of_released_models() -> None:
    arguments = latent_case(16, RELEASED, 64, BF16, [(3, 514), (1, 33)])
    op_set("auto", 2).latent_attention(*arguments)
    expected = latents_expanded(arguments)
    assert float((arguments[-1] - expected).norm() / expected.norm()) < FORMATS[BF16]
    assert float((latents_absorbed(arguments) - expected).norm() / expected.norm()) < 1e-12


def long_cases() -> list[Any]:
    """All pages on the best backend, of which one of each format is quick; other backends, in the night, with one."""
    cases = []
    for backend, heads, page, dtype in itertools.product(backends(), (16, 64, 128), (16, 32, 64), LONG_FORMATS):
        is_best = backend == backends()[0]
        if is_best or page == 32:
            is_quick = is_best and (heads, page) == (16, 32)
            cases.append(pytest.param(backend, heads, page, dtype, marks=() if is_quick else pytest.mark.nightly))
    return cases


@pytest.mark.parametrize(("backend", "heads", "page", "dtype"), long_cases())
def test_long_contexts_of_released_models(backend: str, heads: int, page: int, dtype: torch.dtype) -> None:
    for new in (1, 3):
        requests = [(min(new, length), length) for length in (0, 1, 33, 514, 2743, 8736, 17)]
        arguments = latent_case(heads, RELEASED, page, dtype, requests)
        op_set(backend, 2).latent_attention(*arguments)
        expected = latents_absorbed(arguments)
        assert float((arguments[-1] - expected).norm() / expected.norm()) < LONG_FORMATS[dtype], new


@pytest.mark.parametrize("dtype", FORMATS, ids=["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize(("heads", "sizes"), SHAPES.values(), ids=SHAPES)
def test_a_row_has_the_same_bits_in_any_chunk_and_on_any_threads(
    heads: int, sizes: tuple[int, int, int, int], backend: str, dtype: torch.dtype
) -> None:
    """Of the 70 tokens of a prompt some, alone."""
    whole = latent_case(heads, sizes, 16, dtype, LENGTHS)
    op_set(backend).latent_attention(*whole)
    meta, begin = whole[4], 6
    pages = meta.page_indices[int(meta.page_indptr[5]) : int(meta.page_indptr[6])]
    for first, stop in ((69, 70), (68, 69), (1, 70), (1, 6)):
        part = list(whole)
        part[4] = Meta(ints([0, stop - first]), ints([0, len(pages)]), pages, ints([stop]), meta.kv_head_of, meta.scale)
        part[0] = whole[0][begin + first : begin + stop].clone()
        part[5:] = [torch.full_like(each[: stop - first], torch.nan) for each in whole[5:]]
        op_set(backend, 3).latent_attention(*part)
        assert same(part[-1], whole[-1][begin + first : begin + stop]), (first, stop)


@pytest.mark.parametrize("dtype", FORMATS, ids=["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("backend", backends())
def test_what_is_appended_has_the_bits_of_the_single_ops(backend: str, dtype: torch.dtype) -> None:
    n, heads, key, latent, rot = 37, 5, 24, 48, 16
    q, turned, positions, cos_sin = rotary(n, heads, 1, rot, rot)
    plain, kept, weight = randn(n, heads, key, seed=2), randn(n, latent, seed=3), randn(latent, seed=4)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(n))[:n].int()
    shape = 4, 1, 16, latent + rot
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(4)]
    scales = [torch.zeros(4, 1, 2, 16) if dtype in QUANTISED_PAGES else None for _ in range(4)]
    ops, q_scales = op_set(backend), 1 + torch.arange(len(cos_sin)) / 7
    ours, kv = torch.cat((plain, q), 2), torch.cat((kept, turned[:, 0]), 1)
    rotation = Rotation(positions, cos_sin, q_scales)
    op_set(backend, 3).latent_append(ours, kv, weight, 1e-6, rotation, caches[0], scales[0], slots)
    ops.rms_norm(kept, weight, 1e-6, kept)
    ops.rotary(q, turned, positions, cos_sin)
    rows = torch.cat((kept, turned[:, 0]), 1)
    assert same(ours, torch.cat((plain, q), 2) * q_scales[positions.long()][:, None, None])
    assert same(kv, rows)
    ops.append_kv(rows[:, None], rows[:, None], caches[1], caches[2], scales[1], scales[2], slots)
    assert same(caches[0], caches[1])
    assert scales[0] is None or same(scales[0], scales[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", backends())
def test_rows_may_be_columns_of_a_wider_tensor(backend: str) -> None:
    ops, heads, sizes = op_set(backend, 2), 5, (40, 9, 6, 11)
    latent, key, rot, _ = sizes
    q, weights, cache, scales, *rest, out = latent_case(heads, sizes, 16, BF16, [(1, 33), (3, 20)])
    n, width, norm = len(q), q[0].numel(), randn(latent, seed=4)
    kv, cos_sin = randn(n, latent + rot, seed=3), randn(40, rot, seed=6)
    rotation, slots = Rotation(torch.arange(n).int(), cos_sin), torch.arange(n).int()
    both = torch.cat((torch.full((n, 2), 7.0), q.flatten(1), kv), 1)
    found = []
    for own_q, own_kv in ((q, kv), (both[:, 2 : 2 + width].unflatten(1, (heads, key + rot)), both[:, 2 + width :])):
        own, its = cache.clone(), torch.empty_like(out)
        ops.latent_append(own_q, own_kv, norm, 1e-6, rotation, own, scales, slots)
        ops.latent_attention(own_q, weights, own, scales, *rest, its)
        found.append((own_q, own_kv, own, its))
    assert all(same(*each) for each in zip(*found, strict=True))
    assert (both[:, :2] == 7).all()


@pytest.mark.parametrize("backend", NATIVE[:1])
def test_what_does_not_fit_is_refused(backend: str) -> None:
    ops = op_set(backend)
    arguments = latent_case(3, (32, 16, 8, 12), 16, F32, [(2, 20)])
    for place, other, message in (
        (1, LatentWeights(randn(3, 32, 30), randn(3, 12, 32)), "k_up has more elements"),
        (1, LatentWeights(randn(3, 32, 16), randn(3, 12, 30)), "v_up has shape"),
        (2, randn(3, 1, 16, 41), "cache"),
        (3, randn(3, 1, 2, 16), "scales are given"),
        (5, randn(2, 3, 41), "absorbed has shape"),
        (7, randn(1, 3, 12), "out has shape"),
    ):
        changed = [*arguments[:place], other, *arguments[place + 1 :]]
        with pytest.raises(ValueError, match=message):
            ops.latent_attention(*changed)
