"""Products of many rows on Hopper, with what becomes of them: see gemm_sm90.cu."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch, tensor_map
from allspan.kernels.cuda.linear.products import ADD, GATED, STORE
from allspan.kernels.errors import BackendUnavailable

CAPABILITY = (9, 0)

_ROWS, _FEATURES, _STAGES, _THREADS = 128, 256, 4, 384
_STAGE = (_ROWS + _FEATURES) * 128
_SHARED = 1024 - 128 + _STAGES * _STAGE + 8 * 2 * 2048 + _FEATURES * 8 + (2 * _STAGES + 2) * 8
_BAND = 2048
"""Rows that meet all features before the next ones do: at 128 bytes of depth, as much as a wave of blocks reads of the
weight."""

_LEAST_ROWS = 256
_FLOPS = {torch.bfloat16: 0.68e15, torch.float16: 0.68e15, torch.float8_e4m3fn: 1.25e15}
"""A second, of an H200: of cuBLAS's kernels, and of this one while all multiprocessors have a tile."""
_PASS_BYTES, _PASS_S = 4e12, 4e-6
"""A second, and seconds: what a pass behind cuBLAS reads and writes, and takes at least."""


@dataclass(frozen=True, slots=True)
class Scales:
    """x · weight times these is the product, of e4m3."""

    rows: Tensor
    """float32 [n]."""
    numbers: Tensor
    """float32 [features, 2]: see kernels/rows.py; the first of each."""


def gemm_sm90(
    x: Tensor,
    matrix: Tensor,
    scales: Scales | None,
    bias: Tensor | None,
    out: Tensor,
    epilogue: int,
    band: int = _BAND,
) -> None:
    """out = x · matrixᵀ (· scales + bias), or what `epilogue` (STORE, ADD, GATED) makes of it.

    x [n, depth] and matrix [features, depth] are both bfloat16 or float16, or e4m3 with `scales`; bias float32
    [features]. out is of their type, with e4m3 of any 16 bits, [n, features], float32 for ADD; GATED has half as many.
    Rows may be apart, but begin at multiples of 16 bytes, and a row of out is whole 16 bytes. Sums are float32, those
    of e4m3 as the tensor cores have them (what cuBLAS calls fast accumulation).

    `band`: rows, see the kernel. Raises ValueError for what the kernel does not take, BackendUnavailable on other GPUs
    than Hopper.
    """
    device = gpu(x.device)
    if device.capability != CAPABILITY:
        raise BackendUnavailable("gemm_sm90: made for compute capability 9.0, not {}.{}".format(*device.capability))
    _check(x, matrix, scales, bias, out, epilogue)
    (rows, depth), features, outputs = x.shape, len(matrix), out.shape[1]
    if 0 in (rows, outputs):
        return
    blocks = min(_tiles(rows, features), device.multiprocessors)
    steps = -(-depth * x.element_size() // 128)
    arguments = (
        tensor_map(x, 128), tensor_map(matrix, 128), tensor_map(out, 16), scales and scales.rows,
        scales and scales.numbers, bias, *map(np.int32, (rows, features, outputs, steps, band // _ROWS)),
    )  # fmt: skip
    launch(_kernel(x.dtype, epilogue, out.dtype), (blocks,), _THREADS, arguments, _SHARED, is_early=True)


def pays(x: Tensor, matrix: Tensor, out: Tensor, epilogue: int) -> bool:
    """Whether `gemm_sm90` takes these, and the pass behind cuBLAS which it saves takes longer than what multiprocessors
    without a tile could do in the last wave. Without a pass both are as fast."""
    device = gpu(x.device)
    if len(x) < _LEAST_ROWS or device.capability != CAPABILITY or x.dtype not in _FLOPS:
        return False
    if x.dtype in HALVES and epilogue != GATED:
        return False
    if out.dtype not in _outcomes(x, epilogue):
        return False
    if any(t.data_ptr() % 16 or t.stride(0) * t.element_size() % 16 or t.stride(1) != 1 for t in (x, matrix, out)):
        return False
    if _is_ragged(out):
        return False
    (rows, depth), features = x.shape, len(matrix)
    waves = -(-_tiles(rows, features) // device.multiprocessors)
    idle = waves * device.multiprocessors * _ROWS * _FEATURES - rows * features
    return 2 * idle * depth / _FLOPS[x.dtype] < _PASS_S + 4 * rows * features / _PASS_BYTES


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    if capability == CAPABILITY:
        for dtype in HALVES:
            for inputs, epilogue in itertools.product((dtype, torch.float8_e4m3fn), (STORE, ADD, GATED)):
                yield _kernel(inputs, epilogue, torch.float32 if epilogue == ADD else dtype)


def _kernel(inputs: torch.dtype, epilogue: int, out: torch.dtype) -> Kernel:
    is_e4m3 = int(inputs is torch.float8_e4m3fn)
    return kernel("linear/gemm_sm90.cu", "gemm_sm90", E4M3=is_e4m3, EPILOGUE=epilogue, **element_macro(inputs, out))


def _tiles(rows: int, features: int) -> int:
    return -(-rows // _ROWS) * -(-features // _FEATURES)


def _check(x: Tensor, matrix: Tensor, scales: Scales | None, bias: Tensor | None, out: Tensor, epilogue: int) -> None:
    dtypes = HALVES if scales is None else (torch.float8_e4m3fn,)
    features = len(matrix)
    if x.dtype not in dtypes or matrix.dtype != x.dtype or x.shape[1] != matrix.shape[1] or x.shape[1] == 0:
        sides = f"x: {x.dtype} {list(x.shape)} and matrix {matrix.dtype} {list(matrix.shape)}"
        raise ValueError(f"{sides} are not {' or '.join(map(str, dtypes))}")
    outputs = features // 2 if epilogue == GATED else features
    kinds = _outcomes(x, epilogue)
    if out.dtype not in kinds or tuple(out.shape) != (len(x), outputs):
        raise ValueError(
            f"out: {out.dtype} {list(out.shape)} is not {' or '.join(map(str, kinds))} [{len(x)}, {outputs}]"
        )
    if _is_ragged(out):
        raise ValueError(f"out: rows of {outputs} elements ({out.dtype}) are no multiple of 16 bytes")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (features,) or not bias.is_contiguous()):
        raise ValueError(f"bias: {bias.dtype} {list(bias.shape)} is not float32 [{features}]")
    if scales is not None and (scales.rows.shape != (len(x),) or scales.numbers.shape != (features, 2)):
        raise ValueError(f"scales: {list(scales.rows.shape)} and {list(scales.numbers.shape)} are not of x and matrix")


def _outcomes(x: Tensor, epilogue: int) -> tuple[torch.dtype, ...]:
    """The types that out may have."""
    if epilogue == ADD:
        return (torch.float32,)
    return (x.dtype,) if x.dtype in HALVES else HALVES


def _is_ragged(out: Tensor) -> bool:
    """What copies tiles out writes whole 16 bytes, also past the end of a row."""
    return out.shape[1] * out.element_size() % 16 != 0
