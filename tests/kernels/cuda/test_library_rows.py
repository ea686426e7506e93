"""FlashInfer's names over the CUDA kernels: what treats rows on their own, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import allspan.kernels.cuda as flashinfer
from support.kernel_library import Batch, close, randn, turned


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_appended_rows_are_in_their_pages(layout: str, device: str) -> None:
    batch = Batch([5, 0, 19], device)
    indptr, lengths = torch.tensor([0, 2, 2, 12], dtype=torch.int32, device=device), batch.table
    seq_lens = flashinfer.get_seq_lens(lengths[0], lengths[2], batch.page)
    assert seq_lens.tolist() == batch.lengths
    rows, places = flashinfer.get_batch_indices_positions(indptr, seq_lens, 13)
    assert rows.tolist() == [0, 0, *[2] * 10, -1]
    assert places.tolist() == [3, 4, *range(9, 19), -1]
    k, v = randn(13, 2, 64, device=device, seed=9), randn(13, 2, 64, device=device, seed=10)
    cache = batch.cache if layout == "NHD" else batch.cache.transpose(2, 3).contiguous()
    before = cache.clone()
    table = batch.table[1], batch.table[0], batch.table[2]
    flashinfer.append_paged_kv_cache(k, v, rows, places, cache, *table, kv_layout=layout)
    batch.cache = cache if layout == "NHD" else cache.transpose(2, 3)
    assert torch.equal(batch.kv(0)[0][3:], k[:2])
    assert torch.equal(batch.kv(2)[1][9:], v[2:12])
    assert (cache != before).flatten(3).any(-1).sum() <= 2 * 12 * 2


def test_rotations_agree_with_float64(device: str) -> None:
    q, k = randn(5, 3, 64, device=device), randn(5, 1, 64, device=device)
    indptr, offsets = torch.tensor([0, 2, 5]), torch.tensor([7, 100])
    places = torch.tensor([7, 8, 100, 101, 102])
    for found, x in zip(flashinfer.apply_rope(q, k, indptr, offsets), (q, k), strict=True):
        close(found, turned(x, places))
    found_q, _ = flashinfer.apply_rope_pos_ids(q, k, places, rotary_dim=32, rope_theta=1e5)
    close(found_q, torch.cat((turned(q[..., :32], places, 1.0, 1e5), q[..., 32:].double()), -1))
    half = torch.arange(32).double()
    frequency = 5e5 ** (-half / 32)
    smooth = ((8192 * frequency / (2 * math.pi) - 1) / 3).clamp(0, 1)
    angles = places.double()[:, None] * frequency * (smooth + (1 - smooth) / 8)
    table = torch.cat((angles.cos(), angles.sin()), 1).float().to(device)
    rows = torch.arange(5)
    right, _ = flashinfer.apply_rope_with_cos_sin_cache(rows, q.view(5, -1), k.view(5, -1), 64, table)
    flashinfer.apply_llama31_rope_inplace(q, k, indptr, offsets)
    close(q, right.view(q.shape))


def test_norms_and_activations_agree_with_float64(device: str) -> None:
    x, residual, weight = (randn(*shape, device=device) for shape in ((3, 5, 64), (15, 64), (64,)))

    def normed(rows: Tensor, by: Tensor) -> Tensor:
        rows = rows.double()
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * by.double()

    close(flashinfer.rmsnorm(x, weight), normed(x, weight))
    close(flashinfer.gemma_rmsnorm(x, weight), normed(x, weight.double() + 1), 4e-3)
    close(flashinfer.silu_and_mul(x), torch.nn.functional.silu(x[..., :32].double()) * x[..., 32:].double())
    rows, total = x.view(15, 64).clone(), (x.view(15, 64).double() + residual.double()).half()
    flashinfer.fused_add_rmsnorm(rows, residual, weight)
    close(residual, total)
    close(rows, normed(total, weight), 4e-3)


def test_samples_come_from_what_the_filters_leave(device: str) -> None:
    probs = torch.softmax(2 * randn(4, 60, device=device, dtype=torch.float32), -1)
    likely = probs.sort(-1, descending=True)
    many = torch.arange(4, device=device, dtype=torch.int32).repeat_interleave(8)

    def ranks(tokens: Tensor) -> Tensor:
        assert tokens.dtype is torch.int32
        return (likely.indices[many.long()] == tokens[:, None]).int().argmax(-1)

    assert ranks(flashinfer.top_k_sampling_from_probs(probs, 5, many)).max() < 5
    few = torch.tensor([1, 2, 3, 4], device=device)[many.long()]
    assert (ranks(flashinfer.top_k_top_p_sampling_from_logits(probs.log(), few, 1.0, many)) < few).all()
    before = likely.values.cumsum(-1) - likely.values
    allowed = (before < 0.5).sum(-1)[many.long()]
    assert (ranks(flashinfer.top_p_sampling_from_probs(probs, 0.5, many)) < allowed).all()
    allowed = (likely.values >= 0.3 * likely.values[:, :1]).sum(-1)[many.long()]
    assert (ranks(flashinfer.min_p_sampling_from_probs(probs, 0.3, many)) < allowed).all()
    same = [flashinfer.sampling_from_probs(probs, many, seed=5, offset=7) for _ in range(2)]
    assert torch.equal(*same)
    assert len(same[0].unique()) > 4
    tempered = flashinfer.softmax(probs.log(), temperature=0.5)
    close(tempered, probs.square() / probs.square().sum(-1, keepdim=True), 1e-5)
    with pytest.raises(ValueError, match="filter_apply_order: 'joint'"):
        flashinfer.top_k_top_p_sampling_from_probs(probs, 2, 0.5, filter_apply_order="joint")
