"""Ops that treat every row on its own, on a GPU: norm.cu and elementwise.cu. What they read and write is in ops.py.

Every tensor of elements may be float32 or bfloat16, or float32 or float16, and so may norm weights; sums are float32
(a residual of 16 bits is rounded before the norm sees it, as vLLM does). Rows may have any length and are fastest where
it is a multiple of 8.
All raise ValueError for what does not fit, BackendUnavailable without CuPy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.cuda.rows.rows import FLOATS, check, elementwise, norm_rows


def embedding(ids: Tensor, weight: Tensor, first_row: int, out: Tensor) -> None:
    """See `OpSet.embedding`."""
    check("ids", ids, [torch.int32], tuple(ids.shape[:1]))
    check("weight", weight, FLOATS, (len(weight), out.shape[1]))
    check("out", out, FLOATS, (len(ids), weight.shape[1]))
    elementwise("gather", weight, out, gather=(ids, first_row))


def gather_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """See `OpSet.gather_rows`. A row of -1 is zeros."""
    check("rows", rows, [torch.int32], tuple(rows.shape[:1]))
    check("x", x, FLOATS, (len(x), out.shape[1]))
    check("out", out, FLOATS, (len(rows), x.shape[1]))
    elementwise("gather", x, out, gather=(rows, 0))


def add(x: Tensor, residual: Tensor) -> None:
    """See `OpSet.add`."""
    check("residual", residual, FLOATS, (len(x), x.shape[1]))
    check("x", x, FLOATS, (len(residual), residual.shape[1]))
    elementwise("add", residual, residual, addend=x)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See `OpSet.silu_mul`."""
    check_gate_up(gate_up, out)
    check("out", out, FLOATS, (len(gate_up), out.shape[1]))
    elementwise("silu", gate_up, out)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `OpSet.rms_norm`."""
    check("out", out, FLOATS, (len(x), x.shape[1]))
    check_norm(x, x, weight)
    norm_rows("norm", x, None, (weight, eps), out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `OpSet.add_rms_norm`. FlashInfer's and vLLM's fused_add_rmsnorm: residual of 16 bits, `out` is `x`."""
    check("out", out, FLOATS, (len(x), x.shape[1]))
    check_norm(x, residual, weight)
    norm_rows("norm", residual, x, (weight, eps), out)


def check_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Raises ValueError for what norm.cu would read past."""
    check("x", x, FLOATS, (len(x), x.shape[1]))
    check("residual", residual, FLOATS, (len(x), x.shape[1]))
    check("weight", weight, FLOATS, (x.shape[1],))


def check_gate_up(gate_up: Tensor, out: Tensor) -> None:
    """Raises ValueError unless gate and up have out's shape."""
    check("gate_up", gate_up, FLOATS, (len(out), 2 * out.shape[1]))
