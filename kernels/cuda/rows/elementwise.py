"""Ops that need no more of a row than the element at hand, on a GPU: elementwise.cu. What they read and write is in
ops.py; types and errors are those of norm.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel, element_macro, kernel, launch
from allspan.kernels.cuda.rows.arguments import (
    EARLY,
    FLOATS,
    TYPES,
    Types,
    check,
    is_whole,
    strides_of,
    type_number,
    unit_of,
)
from allspan.kernels.ops import ACTIVATIONS

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_OPS = {"plain": 0, "add": 1, "silu": 2, "gather": 3, "gelu_tanh": 4, "soft_cap": 5, "clamped_swiglu": 6}


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


def gated_mul(gate_up: Tensor, activation: str, out: Tensor) -> None:
    """See `OpSet.gated_mul`."""
    check_gate_up(gate_up, out)
    check("out", out, FLOATS, (len(gate_up), out.shape[1]))
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is none of {', '.join(ACTIVATIONS)}")
    elementwise(activation, gate_up, out)


def soft_cap(x: Tensor, cap: float) -> None:
    """See `OpSet.soft_cap`."""
    check("x", x, FLOATS, (len(x), x.shape[1]))
    elementwise("soft_cap", x, x, cap=cap)


def check_gate_up(gate_up: Tensor, out: Tensor) -> None:
    """Raises ValueError unless gate and up have out's shape."""
    check("gate_up", gate_up, FLOATS, (len(out), 2 * out.shape[1]))


def elementwise(
    op: str,
    source: Tensor,
    out: Tensor,
    addend: Tensor | None = None,
    gather: tuple[Tensor, int] | None = None,
    scales: Tensor | None = None,
    cap: float = 0.0,
) -> None:
    """Several thread blocks a row: see elementwise.cu. With `add`, out is the source. gather: ids and the first."""
    n, width = out.shape
    if out.numel() == 0:
        return
    ids, first = gather or (None, 0)
    types = (source.dtype, None if addend is None else addend.dtype, out.dtype)
    function = _elementwise_kernel(op, types, is_whole(width, source, addend, out))
    units = -(-width // unit_of(source, addend, out))
    threads = min(256, -(-units // 32) * 32)
    pieces = -(-units // threads)
    arguments = [
        source, addend, ids, np.int32(first), np.int32(len(source)), np.float32(cap), out, scales, *strides_of(scales),
        np.int32(width), np.int32(pieces),
    ]  # fmt: skip
    launch(function, (n * pieces,), threads, arguments, is_early=EARLY)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yields the kernels of float32 streams with 16 bits around them; others compile at their first use."""
    f32, bf16, _, e4m3, f16 = TYPES
    for whole in (0, 1):
        yield _elementwise_kernel("add", (f32, bf16, f32), whole)
        yield from (_elementwise_kernel(op, (bf16, None, bf16), whole) for op in ACTIVATIONS)
        yield _elementwise_kernel("soft_cap", (f32, None, f32), whole)
        yield from (_elementwise_kernel("gather", (bf16, None, dtype), whole) for dtype in (f32, bf16))
    yield _elementwise_kernel("gather", (f32, None, f32), 1)
    yield from (_elementwise_kernel(op, (bf16, None, e4m3), 1) for op in ("plain", "silu"))
    yield _elementwise_kernel("add", (f32, f16, f32), 1)
    yield from (_elementwise_kernel("gather", (f16, None, dtype), 1) for dtype in (f32, f16))
    yield from (_elementwise_kernel(op, (f16, None, f16), 1) for op in ACTIVATIONS)


def _elementwise_kernel(op: str, types: Types, whole: int) -> Kernel:
    """types: of source, addend and out."""
    source, addend, out = map(type_number, types)
    return kernel(
        "rows/elementwise.cu", "elementwise", OP=_OPS[op], SOURCE=source, ADDEND=addend, OUT=out,
        WHOLE=whole, **element_macro(*types),
    )  # fmt: skip
