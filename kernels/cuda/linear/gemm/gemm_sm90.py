"""Matrix products of many rows on Hopper, with their epilogues: see gemm_sm90.cu."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch, tensor_map
from allspan.kernels.cuda.linear.call import ADD, GATED, STORE, LinearCall
from allspan.kernels.cuda.linear.dequantise import matrix_of
from allspan.kernels.cuda.linear.quantise_input import quantise_rows
from allspan.kernels.errors import BackendUnavailable
from allspan.kernels.row_layout import codes_of, qparams_of

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
    qparams: Tensor
    """float32 [features, 2]: see kernels/row_layout.py; the first of each."""


@dataclass(frozen=True, slots=True)
class TileAdapters:
    """What low-rank adapters add to a gated product of 16-bit elements: see of_tiles.cuh."""

    argument: bytes
    """The kernel's parameter."""
    pairs: Tensor
    """What that points to."""
    panels: Tensor
    """[places · panels, R, 64], of x's type."""


def gemm_sm90(
    x: Tensor,
    matrix: Tensor,
    scales: Scales | None,
    bias: Tensor | None,
    out: Tensor,
    epilogue: int,
    band: int = _BAND,
    adapters: TileAdapters | None = None,
) -> None:
    """out = x · matrixᵀ (· scales + bias), or what `epilogue` (STORE, ADD or one of GATED) makes of it.

    x [n, depth] and matrix [features, depth] are both bfloat16 or float16, or e4m3 with `scales`; bias float32
    [features]. out: of their type, with e4m3 of any 16 bits, [n, features], float32 for ADD; gated, [n, features/2].
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
    arguments: tuple[Any, ...] = (
        tensor_map(x, 128), tensor_map(matrix, 128), tensor_map(out, 16), scales and scales.rows,
        scales and scales.qparams, bias, *map(np.int32, (rows, features, outputs, steps, band // _ROWS)),
    )  # fmt: skip
    if adapters is not None:
        arguments = *arguments, tensor_map(adapters.panels, 16), adapters.argument
    what = _kernel(x.dtype, epilogue, out.dtype, adapters is not None)
    launch(what, (blocks,), _THREADS, arguments, _SHARED, is_early=True)


def run_halves(call: LinearCall, adapters: TileAdapters | None = None) -> None:
    """Multiplies in x's type; quantised weights are dequantised before."""
    view = call.output.view(call.spec)
    gemm_sm90(call.x, matrix_of(call), None, call.bias, view, call.output.epilogue, adapters=adapters)


def run_e4m3(call: LinearCall) -> None:
    """Multiplies e4m3 by e4m3, both in the order of a k tile."""
    codes, scales, _ = quantise_rows(call.padded_x(), call.spec, torch.float8_e4m3fn)
    matrix = codes_of(call.weight, call.spec).view(torch.float8_e4m3fn)
    factors = Scales(scales, qparams_of(call.weight, call.spec)[0])
    gemm_sm90(codes, matrix, factors, call.bias, call.output.view(call.spec), call.output.epilogue)


def pays_halves(call: LinearCall) -> bool:
    """Whether `run_halves` is faster than cuBLAS, and takes these tensors."""
    spec, x = call.spec, call.x
    if not pays((call.rows, spec.features, spec.inputs), x.dtype, call.output.view(spec), call.output.epilogue):
        return False
    lies_well = spec.k_offset % 8 == 0 and (spec.kind.bits < 16 or call.weight.data_ptr() % 16 == 0)
    return lies_well and _is_aligned(x)


def pays_e4m3(call: LinearCall) -> bool:
    """Whether `run_e4m3` is faster than cuBLAS, and takes these tensors."""
    spec, view = call.spec, call.output.view(call.spec)
    sizes = call.rows, spec.features, spec.depth
    return call.weight.data_ptr() % 16 == 0 and pays(sizes, torch.float8_e4m3fn, view, call.output.epilogue)


def pays(sizes: tuple[int, int, int], dtype: torch.dtype, out: Tensor, epilogue: int) -> bool:
    """Whether `gemm_sm90` takes `out` and `sizes`, rows, features and depth in `dtype`, and is faster than cuBLAS.

    It is where the pass behind cuBLAS which it saves takes longer than what multiprocessors without a tile could do in
    the last wave. Without a pass both are as fast.
    """
    device, (rows, features, depth) = gpu(out.device), sizes
    if rows < _LEAST_ROWS or device.capability != CAPABILITY or dtype not in _FLOPS:
        return False
    if dtype in HALVES and epilogue not in GATED.values():
        return False
    if out.dtype not in _outcomes(dtype, epilogue) or not _is_aligned(out) or _is_ragged(out):
        return False
    waves = -(-_tiles(rows, features) // device.multiprocessors)
    idle = waves * device.multiprocessors * _ROWS * _FEATURES - rows * features
    return 2 * idle * depth / _FLOPS[dtype] < _PASS_S + 4 * rows * features / _PASS_BYTES


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    if capability == CAPABILITY:
        for dtype in HALVES:
            for inputs, epilogue in itertools.product((dtype, torch.float8_e4m3fn), (STORE, ADD, *GATED.values())):
                yield _kernel(inputs, epilogue, torch.float32 if epilogue == ADD else dtype)
            yield from (_kernel(dtype, epilogue, dtype, is_adapted=True) for epilogue in GATED.values())


def _kernel(inputs: torch.dtype, epilogue: int, out: torch.dtype, is_adapted: bool = False) -> Kernel:
    macros = {"E4M3": int(inputs is torch.float8_e4m3fn), "EPILOGUE": epilogue, **element_macro(inputs, out)}
    return kernel("linear/gemm/gemm_sm90.cu", "gemm_sm90", **macros, **({"ADAPTED": 1} if is_adapted else {}))


def _tiles(rows: int, features: int) -> int:
    return -(-rows // _ROWS) * -(-features // _FEATURES)


def _check(x: Tensor, matrix: Tensor, scales: Scales | None, bias: Tensor | None, out: Tensor, epilogue: int) -> None:
    dtypes = HALVES if scales is None else (torch.float8_e4m3fn,)
    features = len(matrix)
    if x.dtype not in dtypes or matrix.dtype != x.dtype or x.shape[1] != matrix.shape[1] or x.shape[1] == 0:
        sides = f"x: {x.dtype} {list(x.shape)} and matrix {matrix.dtype} {list(matrix.shape)}"
        raise ValueError(f"{sides} are not {' or '.join(map(str, dtypes))}")
    outputs = features // 2 if epilogue in GATED.values() else features
    kinds = _outcomes(x.dtype, epilogue)
    if out.dtype not in kinds or tuple(out.shape) != (len(x), outputs):
        raise ValueError(
            f"out: {out.dtype} {list(out.shape)} is not {' or '.join(map(str, kinds))} [{len(x)}, {outputs}]"
        )
    if _is_ragged(out):
        raise ValueError(f"out: rows of {outputs} elements ({out.dtype}) are no multiple of 16 bytes")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (features,) or not bias.is_contiguous()):
        raise ValueError(f"bias: {bias.dtype} {list(bias.shape)} is not float32 [{features}]")
    if scales is not None and (scales.rows.shape != (len(x),) or scales.qparams.shape != (features, 2)):
        raise ValueError(f"scales: {list(scales.rows.shape)} and {list(scales.qparams.shape)} are not of x and matrix")


def _outcomes(dtype: torch.dtype, epilogue: int) -> tuple[torch.dtype, ...]:
    """Returns the types that out may have."""
    if epilogue == ADD:
        return (torch.float32,)
    return (dtype,) if dtype in HALVES else HALVES


def _is_ragged(out: Tensor) -> bool:
    """What copies tiles out writes whole 16 bytes, also past the end of a row."""
    return out.shape[1] * out.element_size() % 16 != 0


def _is_aligned(matrix: Tensor) -> bool:
    """Whether rows of `matrix` begin at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.stride(1) == 1
