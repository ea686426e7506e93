"""RMSNorm, alone or with the residual's sum, and LayerNorm, on a GPU: rms_norm.cu. What these read and write: ops.py.

Every tensor of elements may be float32 or bfloat16, or float32 or float16, and so may norm weights; sums are float32
(a residual of 16 bits is rounded before the norm sees it, as vLLM does). Rows may have any length and are fastest where
it is a multiple of 8. All raise ValueError for what does not fit, BackendUnavailable without CuPy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, kernel, launch
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
from allspan.kernels.cuda.rows.silu_rows import silu_rows

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_OPS = {"plain": 0, "norm": 1, "silu": 2, "layer_norm": 3}
_BLOCK, _MOST_BLOCK, _MOST_UNITS = 512, 1024, 8


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `OpSet.rms_norm`."""
    check("out", out, FLOATS, (len(x), x.shape[1]))
    check("weight", weight, FLOATS, (x.shape[1],))
    if x.dtype not in FLOATS or x.stride(1) != 1:
        raise ValueError(f"x: {x.dtype} {tuple(x.shape)} {x.stride()} is not of floats, each row contiguous")
    norm_rows("norm", x, None, (weight, eps), out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `OpSet.add_rms_norm`. FlashInfer's and vLLM's fused_add_rmsnorm: residual of 16 bits, `out` is `x`."""
    check("out", out, FLOATS, (len(x), x.shape[1]))
    check_norm(x, residual, weight)
    norm_rows("norm", residual, x, (weight, eps), out)


def layer_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `OpSet.layer_norm`."""
    check("out", out, FLOATS, (len(x), x.shape[1]))
    check_norm(x, x, weight)
    norm_rows("layer_norm", x, None, (weight, eps), out)


def check_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Raises ValueError for what rms_norm.cu would read past."""
    check("x", x, FLOATS, (len(x), x.shape[1]))
    check("residual", residual, FLOATS, (len(x), x.shape[1]))
    check("weight", weight, FLOATS, (x.shape[1],))


def norm_rows(
    op: str,
    source: Tensor,
    addend: Tensor | None,
    norm: tuple[Tensor, float] | None,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """A thread block a row: see rms_norm.cu."""
    n, width = out.shape
    if out.numel() == 0:
        return
    weight, eps = norm or (None, 0.0)
    units = -(-width // unit_of(source, addend, out))
    most = _BLOCK if units <= _BLOCK * _MOST_UNITS else _MOST_BLOCK
    each = -(-units // most)
    is_grouped = scales is not None and scales.ndim == 2
    types = (
        source.dtype,
        None if addend is None else addend.dtype,
        None if weight is None else weight.dtype,
        out.dtype,
    )
    whole = is_whole(width, source, addend, weight, out) * int(source.stride(0) % 8 == 0)
    threads = -(-units // each // 32) * 32
    if (
        op == "silu"
        and source.dtype in HALVES
        and whole
        and not is_grouped
        and silu_rows(source, out, scales, threads, each)
    ):
        return
    function = _norm_kernel(op, types, each, is_grouped, most, whole)
    arguments = [
        addend, source, np.int64(source.stride(0)), weight, np.float32(eps), out, scales, *strides_of(scales),
        np.int32(width),
    ]  # fmt: skip
    launch(function, (n,), threads, arguments, is_early=EARLY)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yields the kernels of float32 streams up to 8,192 wide; others compile at their first use."""
    f32, bf16, int8, e4m3, f16 = TYPES
    for addend in (None, bf16):
        yield _norm_kernel("norm", (f32, addend, f32, bf16), 1, whole=0)
        yield from (_norm_kernel("norm", (f32, addend, f32, bf16), each) for each in range(1, 5))
        for each in (1, 2):
            yield _norm_kernel("norm", (bf16, addend, bf16, bf16), each)
            for out, is_grouped in ((int8, False), (e4m3, False), (e4m3, True)):
                yield _norm_kernel("norm", (f32, addend, f32, out), each, is_grouped)
    yield _norm_kernel("plain", (bf16, None, None, e4m3), 1, whole=0)
    for op, out, each in itertools.product(("plain", "silu"), (int8, e4m3), (1, 2)):
        yield _norm_kernel(op, (bf16, None, None, out), each)
    for addend, each in itertools.product((None, f16), range(1, 5)):
        yield _norm_kernel("norm", (f32, addend, f32, f16), each)
    yield from (_norm_kernel("layer_norm", (f32, None, f32, half), each) for half in (bf16, f16) for each in (1, 2))
    yield from (_norm_kernel("silu", (f16, None, None, out), 1) for out in (int8, e4m3))
    yield from (_norm_kernel("norm", (f16, addend, f16, f16), 1) for addend in (None, f16))


def _norm_kernel(
    op: str, types: Types, units: int, is_grouped: bool = False, threads: int = _BLOCK, whole: int = 1
) -> Kernel:
    """types: of source, addend, weight and out."""
    source, addend, weight, out = map(type_number, types)
    return kernel(
        "rows/rms_norm.cu", "norm_rows", OP=_OPS[op], SOURCE=source, ADDEND=addend, WEIGHT=weight, OUT=out,
        GROUPED=int(is_grouped), UNITS=units, THREADS=threads, WHOLE=whole, **element_macro(*types),
    )  # fmt: skip
