"""Norm of heads, rotary, Hadamard and the writing of pages, alone and as one, against the reference and the rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.rows.rotary_append import append_kv, hadamard, head_norm, rotary, rotary_append
from allspan.kernels.ops import HadamardRotation, HeadNorms, KvPages, Rotation
from allspan.kernels.reference import attention as reference_attention
from allspan.kernels.reference import elementwise as reference
from support.cuda_rows import BF16, F16, F32, is_kept, poisoned, rows

I8, U4, E4M3 = torch.int8, torch.uint8, torch.float8_e4m3fn
FORMATS = {"bfloat16": BF16, "int8": I8, "uint4": U4, "fp8": E4M3}
PAGE = 16
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    rot: int


SMALL = [
    Shape(5, 3, 2, 128, 128),  # elements that turn together are in one lane
    Shape(3, 2, 1, 80, 80),
    Shape(3, 3, 2, 96, 20),
    Shape(2, 1, 1, 256, 256),
    Shape(5, 1, 1, 20, 20),  # no multiple of 8
]
LARGE = [
    Shape(n, heads, kv_heads, dim, rot)
    for n in (1, 19, 64, 1000)
    for heads, kv_heads, dim, rot in [
        (32, 8, 128, 128), (28, 4, 128, 128), (5, 1, 64, 64), (16, 8, 256, 256), (9, 3, 256, 64), (4, 2, 192, 96),
        (6, 6, 80, 32), (7, 2, 112, 112), (3, 1, 96, 10), (4, 4, 20, 20), (2, 1, 33, 32), (1, 1, 8, 8),
    ]
]  # fmt: skip


def table(rot: int, device: str) -> Tensor:
    angles = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(0, rot, 2) / rot)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def positions(n: int, device: str) -> Tensor:
    return torch.tensor([(37 * i + 5) % 512 for i in range(n)], dtype=torch.int32, device=device)


def slots_of(n: int, device: str) -> Tensor:
    """Some are padding."""
    order = torch.randperm((n // PAGE + 2) * PAGE, generator=torch.Generator().manual_seed(n))[:n].int()
    order[2::5] = -1
    return order.to(device)


def pages(shape: Shape, dtype: torch.dtype, device: str, has_scales: bool = True) -> list[Any]:
    """k_cache, v_cache, k_scales, v_scales that nobody has written."""
    width = -(-shape.dim // 2) if dtype is U4 else shape.dim
    size = (shape.tokens // PAGE + 2, shape.kv_heads, PAGE, width)
    caches = [poisoned(*size, dtype=dtype, device=device) for _ in range(2)]
    if dtype in (BF16, F16) or not has_scales:
        return [*caches, None, None]
    return [*caches, *(poisoned(*size[:2], 2, PAGE, dtype=F32, device=device) for _ in range(2))]


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Bit by bit, any NaN for any other."""
    if one is None or other is None:
        return one is other
    one, other = (x.float() if x.dtype.is_floating_point else x for x in (one, other))
    return torch.equal(torch.where(one.isnan(), 0, one), torch.where(other.isnan(), 0, other)) and torch.equal(
        one.isnan(), other.isnan()
    )


def near(x: Tensor, right: Tensor) -> None:
    """Of what is rounded to bfloat16 after each step: a step before may have rounded the other way."""
    torch.testing.assert_close(x.float(), right.float(), rtol=2.0**-7, atol=2.0**-7)


def check_single(shape: Shape, device: str) -> None:
    q = rows(shape.tokens, shape.heads, shape.dim, device=device)
    k = rows(shape.tokens, shape.kv_heads, shape.dim, device=device, seed=1)
    weight = rows(shape.dim, dtype=F32, device=device, seed=2)
    ours, right = q.clone(), q.clone()
    head_norm(ours, weight, EPS)
    reference.head_norm(right, weight, EPS)
    near(ours, right)

    turning = (positions(shape.tokens, device), table(shape.rot, device))
    ours, ours_k, right, right_k = q.clone(), k.clone(), q.clone(), k.clone()
    rotary(ours, ours_k, *turning)
    reference.rotary(right, right_k, *turning)
    near(ours, right)
    near(ours_k, right_k)

    for center in (None, rows(shape.kv_heads, shape.dim, dtype=F32, device=device, seed=3)):
        ours, right = k.clone(), k.clone()
        hadamard(ours, center)
        reference.hadamard(right, center)
        assert torch.equal(ours, right)


def check_append(shape: Shape, dtype: torch.dtype, device: str) -> None:
    k, v = (rows(shape.tokens, shape.kv_heads, shape.dim, device=device, seed=seed) for seed in (0, 1))
    spoil(k)
    slots = slots_of(shape.tokens, device)
    ours, right = pages(shape, dtype, device), pages(shape, dtype, "cpu")
    append_kv(k, v, *ours, slots)
    write(k.cpu(), v.cpu(), right, slots.cpu())  # on a GPU, torch multiplies with the inverse of a number
    for one, other in zip(ours, right, strict=True):
        assert same(one if one is None else one.cpu(), other)
        assert one is None or is_kept(one)


def spoil(k: Tensor) -> None:
    """Rows of one number, without a finite range, with what is not finite."""
    odd = [0.0, 3.0, 1e35, math.nan, math.inf, -math.inf]
    for i, value in enumerate(odd[: len(k) - 1]):
        k[i, 0, : (i + 1) * 7] = value
        if i < 3:
            k[i, 0] = value
    k[-1, -1, 0], k[-1, -1, 1:] = 3e38, -3e38


def write(k: Tensor, v: Tensor, to: list[Any], slots: Tensor) -> None:
    """What the reference writes; it knows nothing of padding and fp8."""
    written = slots >= 0
    k, v, slots = k[written], v[written], slots[written].long()
    if to[0].dtype is not E4M3:
        reference_attention.append_kv(k, v, *to, slots.int())
        return
    for x, cache, scales in ((k, to[0], to[2]), (v, to[1], to[3])):
        top = x.float().abs().amax(-1)
        scale = torch.where(top.isfinite(), (top / 448).clamp(min=1e-12), math.nan)
        n = torch.where(scale.isnan()[..., None], 0.0, x.float() / scale[..., None]).to(E4M3)
        cache.view(torch.uint8)[slots // PAGE, :, slots % PAGE] = n.view(torch.uint8)
        scales[slots // PAGE, :, 0, slots % PAGE] = 0
        scales[slots // PAGE, :, 1, slots % PAGE] = scale


def check_fused(
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    rotation: str,
    has_norms: bool,
    of: torch.dtype = BF16,
    q_scales: Tensor | None = None,
) -> None:
    """The bits are those of the single ops."""
    n, heads, kv_heads, dim = shape.tokens, shape.heads, shape.kv_heads, shape.dim
    qkv = rows(n, heads + 2 * kv_heads, dim, dtype=of, device=device)
    norms = [rows(dim, dtype=F32, device=device, seed=seed) if has_norms else None for seed in (8, 9)]
    center = rows(kv_heads, dim, dtype=F32, device=device, seed=4) if rotation == "centered" else None
    turning, slots = (positions(n, device), table(shape.rot, device)), slots_of(n, device)
    parts = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
    q, k, v = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    for x, norm in zip((q, k), norms, strict=True):
        if norm is not None:
            head_norm(x, norm, EPS)
    rotary(q, k, *turning)
    if q_scales is not None:
        q.mul_(q_scales[turning[0].long()][:, None, None])
    if rotation != "plain":
        hadamard(q, None)
        hadamard(k, center)
    right = pages(shape, dtype, device)
    append_kv(k, v, *right, slots)

    ours, held = poisoned(*qkv.shape, dtype=of, device=device), pages(shape, dtype, device)
    ours.copy_(qkv)
    rotated = HadamardRotation(rotation != "plain", center)
    turned = Rotation(*turning, q_scales)
    rotary_append(ours, heads, HeadNorms(*norms, EPS), turned, rotated, KvPages(*held), slots)  # type: ignore[arg-type]
    assert same(ours, torch.cat((q, k, v), 1))
    assert is_kept(ours)
    for one, other in zip(held, right, strict=True):
        assert same(one, other)
        assert one is None or is_kept(one)


@pytest.mark.parametrize(("shape", "rotation", "has_norms"), [(SMALL[0], "plain", False), (SMALL[2], "hadamard", True)])
def test_queries_are_scaled_by_their_positions(shape: Shape, rotation: str, has_norms: bool, device: str) -> None:
    """After they have turned; keys are left as they are."""
    factors = 1 + torch.arange(512, device=device).log1p() / 3
    check_fused(shape, BF16, device, rotation, has_norms, q_scales=factors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
def test_queries_of_every_shape_are_scaled_by_their_positions(dtype: torch.dtype) -> None:
    factors = 1 + torch.arange(512, device="cuda").log1p() / 3
    for shape in LARGE:
        if not (dtype is U4 and shape.dim % 2):
            check_fused(shape, dtype, "cuda", "plain", True, q_scales=factors)


def check_many(shape: Shape, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the fused op calls it on many tokens, whatever it leaves out."""
    n, heads, kv_heads, dim = shape.tokens, shape.heads, shape.kv_heads, shape.dim
    slots, turning = slots_of(n, device), (positions(n, device), table(shape.rot, device))
    weight = rows(dim, dtype=F32, device=device, seed=8)
    center = rows(kv_heads, dim, dtype=F32, device=device, seed=4)
    plain: tuple[HeadNorms[Tensor], HadamardRotation[Tensor]]
    plain = HeadNorms(None, None, EPS), HadamardRotation(False, None)
    for norms, rotated in (plain, (HeadNorms(None, weight, EPS), HadamardRotation(True, center))):
        outcomes = []
        for many in (1 << 30, 1):
            monkeypatch.setattr("allspan.kernels.cuda.rows.rotary_append._MANY_ROWS", many)
            qkv, held = poisoned(n, heads + 2 * kv_heads, dim, device=device), pages(shape, dtype, device)
            qkv.copy_(rows(*qkv.shape, device=device))
            rotary_append(qkv, heads, norms, Rotation(*turning), rotated, KvPages(*held), slots)  # type: ignore[arg-type]
            assert all(is_kept(x) for x in (qkv, *held) if x is not None)
            outcomes.append((qkv, *held))
        assert all(same(one, other) for one, other in zip(*outcomes, strict=True))


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_single_ops_agree_with_the_reference(shape: Shape, device: str) -> None:
    check_single(shape, device)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_single_ops_of_every_shape_agree_with_the_reference(shape: Shape) -> None:
    check_single(shape, "cuda")


@pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
def test_pages_have_the_bits_of_the_rule(dtype: torch.dtype, device: str) -> None:
    check_append(Shape(17, 0, 2, 128, 0), dtype, device)
    check_append(Shape(17, 0, 1, 80, 0), dtype, device)


def test_heads_that_are_no_multiple_of_8_are_written_whole(device: str) -> None:
    check_append(Shape(17, 0, 2, 19, 0), U4, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [shape for shape in LARGE if shape.tokens > 1], ids=str)
def test_pages_of_every_shape_have_the_bits_of_the_rule(shape: Shape, dtype: torch.dtype) -> None:
    check_append(shape, dtype, "cuda")


@pytest.mark.parametrize("rotation", ["plain", "hadamard", "centered"])
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "normed"])
def test_the_fused_op_has_the_bits_of_the_single_ones(rotation: str, has_norms: bool, device: str) -> None:
    check_fused(SMALL[0], I8 if rotation != "plain" else BF16, device, rotation, has_norms)


@pytest.mark.parametrize("shape", [Shape(5, 6, 3, 128, 128)], ids=str)
def test_many_rows_have_the_bits_of_few(shape: Shape, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_many(shape, I8, device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_many_rows_of_every_shape_have_the_bits_of_few(
    shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_many(shape, dtype, "cuda", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("rotation", ["plain", "hadamard", "centered"])
@pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_the_fused_op_of_every_shape_has_the_bits_of_the_single_ones(
    shape: Shape, dtype: torch.dtype, rotation: str
) -> None:
    for has_norms in (False, True):
        check_fused(shape, dtype, "cuda", rotation, has_norms)
        check_fused(shape, F16 if dtype is BF16 else dtype, "cuda", rotation, has_norms, F16)


def test_every_bfloat16_number_becomes_the_nearest_fp8(device: str) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(BF16)
    x = bits.view(-1, 1, 128).to(device)
    cache = [poisoned(32, 1, PAGE, 128, dtype=E4M3, device=device) for _ in range(2)]
    append_kv(x, x, *cache, None, None, torch.arange(512, dtype=torch.int32, device=device))
    right = x.float().clamp(-448, 448).to(E4M3).view(32, 1, PAGE, 128)
    for held in cache:
        torch.testing.assert_close(held.float(), right.float(), rtol=0, atol=0, equal_nan=True)


def test_pages_by_tokens_in_one_tensor(device: str) -> None:
    """FlashInfer's NHD layout: [pages, 2, page_size, kv_heads, head_dim]."""
    shape = Shape(5, 0, 2, 128, 0)
    k, v = (rows(5, 2, 128, device=device, seed=seed) for seed in (0, 1))
    both = poisoned(2, 2, PAGE, 2, 128, device=device)
    views = [both[:, i].transpose(1, 2) for i in range(2)]
    right, slots = pages(shape, BF16, "cpu"), slots_of(5, device)
    append_kv(k, v, *views, None, None, slots)
    write(k.cpu(), v.cpu(), right, slots.cpu())
    assert all(same(one.cpu(), other) for one, other in zip(views, right[:2], strict=True))


def test_what_does_not_fit_is_refused(device: str) -> None:
    shape = SMALL[0]
    qkv, cache, slots = rows(5, 7, 128, device=device), KvPages(*pages(shape, I8, device)), slots_of(5, device)
    rotation = Rotation(positions(5, device), table(128, device))

    def refused(message: str, x: Tensor = qkv, **other: Any) -> None:
        given = {"num_heads": 3, "rotation": rotation, "pages": cache, "slots": slots} | other
        norms: HeadNorms[Tensor] = HeadNorms(None, None, EPS)
        hadamard: HadamardRotation[Tensor] = HadamardRotation(False, None)
        with pytest.raises(ValueError, match=message):
            rotary_append(x, given["num_heads"], norms, given["rotation"], hadamard, given["pages"], given["slots"])

    refused("qkv: 7 heads are not 4 of queries", num_heads=4)
    refused("q: torch.float32", qkv.float())
    refused("head_dim: 512", rows(5, 7, 512, device=device))
    refused("slots: ", slots=slots.long())
    refused("cos_sin: 130 elements", rotation=Rotation(rotation.positions, table(130, device)))
    refused("k_cache: .* is not", pages=KvPages(*pages(Shape(5, 3, 1, 128, 128), I8, device)))
    refused("k_scales: pages of torch.int8 have scales", pages=KvPages(*cache[:2], None, None))
    halves = pages(shape, BF16, device)
    refused("k_scales: pages of torch.bfloat16 have no scales", pages=KvPages(*halves[:2], *cache[2:]))
    refused("v_cache: torch.bfloat16 .* differs", pages=KvPages(cache[0], halves[1], *cache[2:]))
