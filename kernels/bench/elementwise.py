"""Norms, SwiGLU and rotary with page append, alone and with quantisation, beside the single ops of FlashInfer (and of
torch, where FlashInfer has none); Qwen2.5-7B's widths."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.bench.case import Built, Case, Launch, sets_for
from allspan.kernels.cuda.rows.elementwise import gated_mul
from allspan.kernels.cuda.rows.rms_norm import add_rms_norm
from allspan.kernels.cuda.rows.rotary_append import rotary_append
from allspan.kernels.library.quantised_rows import add_rms_norm_quantised, silu_mul_quantised
from allspan.kernels.ops import HadamardRotation, HeadNorms, KvPages, Rotation
from allspan.kernels.reference import elementwise as reference
from allspan.kernels.reference import rotary_append as reference_append

HIDDEN, INNER, HEADS, KV_HEADS, DIM, PAGE = 3584, 18944, 28, 4, 128, 16
TOKENS = (1, 64, 8192)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def elementwise_cases() -> Iterator[Case]:
    builds: dict[str, Callable[[int, str], Built]] = {
        "add+norm": build_norm,
        "add+norm+e4m3": build_norm_quantised,
        "SwiGLU": build_silu,
        "SwiGLU+e4m3": build_silu_quantised,
        "rotary+append": build_rotary,
    }
    for name, build in builds.items():
        for tokens in TOKENS:
            label = f"{name}, {tokens:,} token{'s' * (tokens > 1)}"
            yield Case("elementwise", label, partial(build, tokens))


def _random(*shape: int, device: str, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device)


def _flashinfer(prepare: Callable[[Any], Launch]) -> Callable[[], Launch]:
    return lambda: prepare(importlib.import_module("flashinfer"))


def build_norm(tokens: int, device: str) -> Built:
    """The residual is bfloat16, as FlashInfer's."""
    num_bytes = tokens * HIDDEN * 8
    sets = sets_for(num_bytes)
    x, residual = (_random(sets, tokens, HIDDEN, device=device) for _ in range(2))
    weight, out = _random(HIDDEN, device=device), torch.empty_like(x[0])

    def ours(i: int) -> None:
        add_rms_norm(x[i], residual[i], weight, 1e-6, out)

    def check(name: str) -> None:
        sums = (residual[0].float() + x[0].float()).to(BF16)
        ours(0)
        torch.testing.assert_close(out.float(), _normed(sums, weight), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(residual[0], sums)

    def peer(flashinfer: Any) -> Launch:
        norm = flashinfer.fused_add_rmsnorm
        inputs, sums = x.clone(), residual.clone()  # it writes over both
        return lambda i: norm(inputs[i], sums[i], weight, 1e-6)

    return Built({"allspan": ours}, check, sets, num_bytes, peers={"FlashInfer": _flashinfer(peer)})


def build_norm_quantised(tokens: int, device: str) -> Built:
    """To e4m3 with a scale a token."""
    num_bytes = tokens * HIDDEN * 7
    sets = sets_for(num_bytes)
    x, residual = (_random(sets, tokens, HIDDEN, device=device) for _ in range(2))
    weight = _random(HIDDEN, device=device)
    out, scales = torch.empty_like(x[0], dtype=E4M3), torch.empty(tokens, device=device)

    def ours(i: int) -> None:
        add_rms_norm_quantised(x[i], residual[i], weight, 1e-6, out, scales)

    def check(name: str) -> None:
        right = _normed((residual[0].float() + x[0].float()).to(BF16), weight)
        ours(0)
        _assert_codes(out, scales, right)

    def peer(flashinfer: Any) -> Launch:
        norm = flashinfer.fused_add_rmsnorm
        inputs, sums = x.clone(), residual.clone()

        def run(i: int) -> None:
            norm(inputs[i], sums[i], weight, 1e-6)
            _quantise(inputs[i])

        return run

    return Built({"allspan": ours}, check, sets, num_bytes, peers={"FlashInfer, then torch": _flashinfer(peer)})


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    right = torch.empty_like(x, dtype=torch.float32)
    reference.rms_norm(x.float(), weight.float(), 1e-6, right)
    return right


def _quantise(x: Tensor) -> Tensor:
    """FlashInfer has no op that finds a token's scale."""
    scales = x.abs().amax(1, keepdim=True).float() / 448
    return (x / scales).to(E4M3)


def _assert_codes(out: Tensor, scales: Tensor, right: Tensor) -> None:
    """e4m3 has 3 bits behind the point."""
    torch.testing.assert_close(out.float() * scales[:, None], right, rtol=0.07, atol=2e-2)


def build_silu(tokens: int, device: str) -> Built:
    num_bytes = tokens * INNER * 6
    sets = sets_for(num_bytes)
    gate_up = _random(sets, tokens, 2 * INNER, device=device)
    out = torch.empty(tokens, INNER, dtype=BF16, device=device)

    def ours(i: int) -> None:
        gated_mul(gate_up[i], "silu", out)

    def check(name: str) -> None:
        right = torch.empty_like(out, dtype=torch.float32)
        reference.gated_mul(gate_up[0].float(), "silu", right)
        ours(0)
        torch.testing.assert_close(out.float(), right, rtol=1e-2, atol=1e-2)

    def peer(flashinfer: Any) -> Launch:
        silu = flashinfer.silu_and_mul
        return lambda i: silu(gate_up[i], out)

    return Built({"allspan": ours}, check, sets, num_bytes, peers={"FlashInfer": _flashinfer(peer)})


def build_silu_quantised(tokens: int, device: str) -> Built:
    """To e4m3 with a scale a token."""
    num_bytes = tokens * INNER * 5
    sets = sets_for(num_bytes)
    gate_up = _random(sets, tokens, 2 * INNER, device=device)
    out, scales = torch.empty(tokens, INNER, dtype=E4M3, device=device), torch.empty(tokens, device=device)

    def ours(i: int) -> None:
        silu_mul_quantised(gate_up[i], out, scales)

    def check(name: str) -> None:
        right = torch.empty(tokens, INNER, device=device)
        reference.gated_mul(gate_up[0].float(), "silu", right)
        ours(0)
        _assert_codes(out, scales, right)

    def peer(flashinfer: Any) -> Launch:
        silu, between = flashinfer.silu_and_mul, torch.empty(tokens, INNER, dtype=BF16, device=device)

        def run(i: int) -> None:
            silu(gate_up[i], between)
            _quantise(between)

        return run

    return Built({"allspan": ours}, check, sets, num_bytes, peers={"FlashInfer, then torch": _flashinfer(peer)})


def build_rotary(tokens: int, device: str) -> Built:
    """FlashInfer: rotary in place on queries and keys, then the append; its token lists are made ahead."""
    width = HEADS + 2 * KV_HEADS
    num_bytes = tokens * DIM * 2 * (2 * (HEADS + KV_HEADS) + 3 * KV_HEADS)
    sets = sets_for(num_bytes)
    qkv = _random(sets, tokens, width, DIM, device=device)
    count = -(-tokens // PAGE)
    keys, values = (torch.zeros(count, KV_HEADS, PAGE, DIM, dtype=BF16, device=device) for _ in range(2))
    indices = torch.randperm(count, device=device).int()
    slots = (indices[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()[:tokens].int()
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    angles = positions[:, None] / 1e4 ** (torch.arange(0, DIM, 2, device=device) / DIM)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).contiguous()
    norms: HeadNorms[Tensor] = HeadNorms(None, None, 1e-6)
    hadamard: HadamardRotation[Tensor] = HadamardRotation(False, None)
    rest = norms, Rotation(positions, cos_sin), hadamard

    def ours(i: int) -> None:
        rotary_append(qkv[i], HEADS, *rest, KvPages(keys, values, None, None), slots)

    def check(name: str) -> None:
        right = qkv[0].float()
        k, v = (torch.zeros_like(page, dtype=torch.float32) for page in (keys, values))
        reference_append.rotary_append(right, HEADS, *rest, KvPages(k, v, None, None), slots)
        ours(0)
        for mine, wanted in zip((qkv[0][:, :HEADS], keys, values), (right[:, :HEADS], k, v), strict=True):
            torch.testing.assert_close(mine.float(), wanted, rtol=2e-2, atol=2e-2)

    def peer(flashinfer: Any) -> Launch:
        rotate = flashinfer.apply_rope_with_cos_sin_cache_inplace
        append = flashinfer.append_paged_kv_cache
        q, k, v = (part.contiguous() for part in torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], 2))
        request = torch.zeros(tokens, dtype=torch.int32, device=device)
        indptr = torch.tensor([0, count], dtype=torch.int32, device=device)
        last = torch.tensor([(tokens - 1) % PAGE + 1], dtype=torch.int32, device=device)
        pages = torch.zeros_like(keys), torch.zeros_like(values)

        def run(i: int) -> None:
            rotate(positions, q[i].flatten(1), k[i].flatten(1), DIM, cos_sin, is_neox=True)
            append(k[i], v[i], request, positions, pages, indices, indptr, last, kv_layout="HND")

        return run

    return Built({"allspan": ours}, check, sets, num_bytes, peers={"FlashInfer": _flashinfer(peer)})
