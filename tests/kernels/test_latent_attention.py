"""Attention over latents against the expanded form, in float64 on what the pages hold, and the op that writes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allspan.kernels.ops import Rotation
from allspan.kernels.table import op_set
from support.kernel_cases import BF16, F32, I8, randn, rotary
from support.latent_cases import F8, QUANTISED_PAGES, latent_case, latents_expanded

FORMATS = {F32: 2e-6, BF16: 5e-3, I8: 5e-3, F8: 5e-3}
"""How far the norm may be off what float64 gives of the same pages."""
LENGTHS = [(1, 1), (1, 33), (3, 514), (1, 17), (0, 0), (70, 70), (3, 2743)]
"""(new tokens, tokens in the cache) of each request."""


def same(ours: Tensor, other: Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", FORMATS, ids=["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("backend", ["reference"])
def test_absorbed_attention_is_expanded_attention(backend: str, dtype: torch.dtype) -> None:
    most = FORMATS[F32]
    for heads, sizes, page_size in ((16, (64, 32, 16, 24), 16), (5, (40, 9, 6, 11), 32), (3, (32, 16, 0, 16), 64)):
        for threads in (1, 3):
            arguments = latent_case(heads, sizes, page_size, dtype, LENGTHS)
            op_set(backend, threads).latent_attention(*arguments)
            expected = latents_expanded(arguments)
            assert float((arguments[-1] - expected).norm() / expected.norm()) < most, (heads, threads)


@pytest.mark.parametrize("dtype", FORMATS, ids=["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("backend", ["reference"])
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
