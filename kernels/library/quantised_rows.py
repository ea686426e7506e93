"""Norms, SwiGLU and activations in int8 or fp8 on a GPU: the quantisation happens in the pass that makes them.

`out` is int8 or float8_e4m3fn [n, W], `scales` float32 [n], or [n, ceil(W / 128)] in any strides for groups of 128
elements; x is read as out · scale. scale = max(largest |x| / 127 or 448, 1e-30), out = x / scale to the nearest (halves
to even). Of a row or group with a NaN or an infinity the scale is NaN. What is quantised is the float32 outcome, not
rounded to 16 bits before. All raise ValueError for what does not fit, BackendUnavailable without CuPy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allspan.kernels.cuda.rows.arguments import FLOATS, GROUP, QUANTISED, check
from allspan.kernels.cuda.rows.elementwise import check_gate_up, elementwise
from allspan.kernels.cuda.rows.rms_norm import check_norm, norm_rows


def quantise_rows(x: Tensor, out: Tensor, scales: Tensor) -> None:
    """out, scales = x, float32 or of 16 bits [n, W]."""
    check("x", x, FLOATS, tuple(out.shape))
    _check(out, scales, x.shape)
    if scales.ndim == 2:
        elementwise("plain", x, out, scales=scales)
    else:
        norm_rows("plain", x, None, None, out, scales)


def rms_norm_quantised(x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor) -> None:
    """out, scales = rms_norm(x)."""
    check_norm(x, x, weight)
    _check(out, scales, x.shape)
    norm_rows("norm", x, None, (weight, eps), out, scales)


def add_rms_norm_quantised(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor
) -> None:
    """residual += x, then out, scales = rms_norm(residual)."""
    check_norm(x, residual, weight)
    _check(out, scales, x.shape)
    norm_rows("norm", residual, x, (weight, eps), out, scales)


def silu_mul_quantised(gate_up: Tensor, out: Tensor, scales: Tensor) -> None:
    """out, scales = silu(gate_up[:, :W]) · gate_up[:, W:]."""
    check_gate_up(gate_up, out)
    _check(out, scales, out.shape)
    if scales.ndim == 2:
        elementwise("silu", gate_up, out, scales=scales)
    else:
        norm_rows("silu", gate_up, None, None, out, scales)


def _check(out: Tensor, scales: Tensor, shape: Sequence[int]) -> None:
    n, width = shape
    check("out", out, QUANTISED, (n, width))
    if scales.dtype is not torch.float32 or tuple(scales.shape) not in ((n,), (n, -(-width // GROUP))):
        raise ValueError(
            f"scales: {scales.dtype} {tuple(scales.shape)} is not float32 ({n},) or ({n}, {-(-width // GROUP)})"
        )
