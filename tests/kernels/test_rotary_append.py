"""The fused op between the q, k, v product and attention: the bits are those of the single ops of the same backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.ops import HadamardRotation, HeadNorms, KvPages, Rotation
from allspan.kernels.table import backends, op_set
from support.kernel_cases import BF16, F32, I8, U4, pages, poison, randn, rotary

FORMATS = {F32: "float32", BF16: "bfloat16", I8: "int8", U4: "uint4"}
SHAPES = [(1, 9, 3, 64, 64), (37, 5, 2, 80, 80), (130, 7, 1, 48, 16), (0, 2, 2, 8, 8)]
"""Tokens, query heads, KV heads, head size, elements that turn."""


def same(ours: Tensor | None, other: Tensor | None) -> bool:
    if ours is None or other is None:
        return ours is other
    return ours.numel() == 0 or torch.equal(ours.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def case(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list[Any], Tensor]:
    """qkv, positions, cos_sin, cache, slots."""
    n, heads, kv_heads, dim, rot = shape
    q, k, positions, cos_sin = rotary(n, heads, kv_heads, dim, rot)
    qkv = torch.cat((q, k, randn(n, kv_heads, dim, seed=3)), 1)
    slots = torch.randperm((n // 16 + 2) * 16, generator=torch.Generator().manual_seed(n))[:n].int()
    return qkv, positions, cos_sin, pages(n // 16 + 2, kv_heads, 16, dim, dtype), slots


@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.values())
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("hadamard", ["off", "on", "centered"])
@pytest.mark.parametrize("backend", backends())
def test_it_has_the_bits_of_the_single_ops(backend: str, hadamard: str, has_norms: bool, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        _, heads, kv_heads, dim, _ = shape
        qkv, positions, cos_sin, cache, slots = case(shape, dtype)
        norms = [randn(dim, seed=8), randn(dim, seed=9)] if has_norms else [None, None]
        center = randn(kv_heads, dim, seed=4) if hadamard == "centered" else None
        ops = op_set(backend)
        parts = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        q, k, v = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        for x, norm in zip((q, k), norms, strict=True):
            if norm is not None:
                ops.head_norm(x, norm, 1e-6)
        ops.rotary(q, k, positions, cos_sin)
        if hadamard != "off":
            ops.hadamard(q, None)
            ops.hadamard(k, center)
        expected = [None if part is None else part.clone() for part in cache]
        ops.append_kv(k, v, *expected, slots)
        for threads in (1, 3):
            ours, held = qkv.clone(), [None if part is None else part.clone() for part in cache]
            op_set(backend, threads).rotary_append(
                ours,
                heads,
                HeadNorms(*norms, 1e-6),
                Rotation(positions, cos_sin),
                HadamardRotation(hadamard != "off", center),
                KvPages(*held),  # type: ignore[arg-type]
                slots,
            )
            assert same(ours, torch.cat((q, k, v), 1)), shape
            assert all(same(one, other) for one, other in zip(held, expected, strict=True)), shape


@pytest.mark.parametrize("backend", backends())
def test_queries_alone_are_scaled_by_their_position_behind_the_rotation(backend: str) -> None:
    for shape in SHAPES:
        _, heads, *_ = shape
        qkv, positions, cos_sin, cache, slots = case(shape, F32)
        q_scales = 1 + torch.arange(len(cos_sin)) / 7
        norms: HeadNorms[Tensor] = HeadNorms(None, None, 1e-6)
        plain, scaled = qkv.clone(), qkv.clone()
        for x, rotation in ((plain, Rotation(positions, cos_sin)), (scaled, Rotation(positions, cos_sin, q_scales))):
            op_set(backend).rotary_append(
                x, heads, norms, rotation, HadamardRotation(False, None), KvPages(*cache), slots
            )
        plain[:, :heads] *= q_scales[positions.long()][:, None, None]
        assert same(scaled, plain), shape


@pytest.mark.parametrize("backend", [name for name in backends() if name.startswith("cpu/")])
def test_what_would_lead_outside_is_refused(backend: str) -> None:
    qkv, positions, cos_sin, cache, slots = case((5, 4, 2, 16, 16), F32)
    ops = op_set(backend)
    norms: HeadNorms[Tensor] = HeadNorms(None, None, 1e-6)
    hadamard: HadamardRotation[Tensor] = HadamardRotation(False, None)
    pages, rotation = KvPages(*cache), Rotation(positions, cos_sin)
    with pytest.raises(ValueError, match="slots"):
        ops.rotary_append(qkv, 4, norms, rotation, hadamard, pages, slots + 10_000)
    short = Rotation(positions, cos_sin, randn(len(cos_sin) - 1))
    with pytest.raises(ValueError, match="q_scales"):
        ops.rotary_append(qkv, 4, norms, short, hadamard, pages, slots)
    with pytest.raises(ValueError, match="values as keys"):
        ops.rotary_append(qkv, 3, norms, rotation, hadamard, pages, slots)
    with pytest.raises(ValueError, match="cos_sin"):
        ops.rotary_append(qkv, 4, norms, Rotation(positions, poison(9, 18)), hadamard, pages, slots)
