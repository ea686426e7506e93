"""Norms and SwiGLU, row by row. Elements are float16, bfloat16 or float32."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.cuda.rows.elementwise import gated_mul
from allspan.kernels.cuda.rows.rms_norm import add_rms_norm, rms_norm
from allspan.kernels.library.arrays import Array, tensor


def rmsnorm(
    input: Array, weight: Array, eps: float = 1e-6, out: Array | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """input / sqrt(mean(input²) + eps) · weight over the last axis; of input's shape."""
    return _norm(tensor("input", input), tensor("weight", weight), eps, out)


def gemma_rmsnorm(
    input: Array, weight: Array, eps: float = 1e-6, out: Array | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """`rmsnorm` with 1 + weight."""
    return _norm(tensor("input", input), tensor("weight", weight).float() + 1, eps, out)


def fused_add_rmsnorm(
    input: Array, residual: Array, weight: Array, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """residual += input, then input = rmsnorm(residual), both in place."""
    _add_norm(tensor("input", input), tensor("residual", residual), tensor("weight", weight), eps)


def gemma_fused_add_rmsnorm(
    input: Array, residual: Array, weight: Array, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """`fused_add_rmsnorm` with 1 + weight."""
    _add_norm(tensor("input", input), tensor("residual", residual), tensor("weight", weight).float() + 1, eps)


def silu_and_mul(input: Array, out: Array | None = None, enable_pdl: bool | None = None) -> Tensor:
    """silu(input[..., :h]) · input[..., h:], of input [..., 2h]."""
    x = tensor("input", input)
    into = x.new_empty(*x.shape[:-1], x.shape[-1] // 2) if out is None else tensor("out", out)
    gated_mul(x.reshape(-1, x.shape[-1]), "silu", _rows(into))
    return into


def _norm(x: Tensor, weight: Tensor, eps: float, out: Array | None) -> Tensor:
    into = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else tensor("out", out)
    rms_norm(x.reshape(-1, x.shape[-1]), weight, eps, _rows(into))
    return into


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    add_rms_norm(_rows(x), _rows(residual), weight, eps, _rows(x))


def _rows(x: Tensor) -> Tensor:
    """What is written must lie together."""
    if not x.is_contiguous():
        raise ValueError(f"out: strides {x.stride()} of {tuple(x.shape)} are not contiguous")
    return x.view(-1, x.shape[-1])
