"""Rows of x in int8 or e4m3, for matrix products with weights of the same type: see quantise_input.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, kernel, launch
from allspan.kernels.cuda.linear.macros import k_tiles
from allspan.kernels.packed_spec import PackedSpec

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_HELD_ROW = 20_480
"""Elements of a row that a block keeps while it looks for the largest: 40 KB, for six blocks a multiprocessor."""
_NARROW = 2048
"""Elements of a row that a warp holds."""
_ROWS_TOGETHER = 8
"""Scales of rows of x lie side by side, and cuBLAS reads them 16 bytes at a time."""


def quantise_rows(x: Tensor, spec: PackedSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x in `dtype` (int8 or e4m3) [n, depth] in the order of a k tile, its scales float32 [n], and of int8 the
    sums of each row's values float32 [n]."""
    codes = torch.empty(len(x), spec.depth, dtype=dtype, device=x.device)
    scales, sums = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    if spec.depth <= _NARROW:
        narrow = _kernel("quantise_narrow", int(spec.kind.is_e4m3), x.dtype)
        sizes = [np.int32(size) for size in (len(x), x.shape[1], k_tiles(spec))]
        launch(narrow, (-(-len(x) // 8),), 256, (x, codes, scales, sums, *sizes))
        return codes, scales, sums
    held = min(x.shape[1], _HELD_ROW)
    sizes = [np.int32(size) for size in (x.shape[1], k_tiles(spec), held)]
    quantise = _kernel("quantise", int(spec.kind.is_e4m3), x.dtype)
    launch(quantise, (len(x),), 256, (x, codes, scales, sums, *sizes), 2 * held)
    return codes, scales, sums


def quantise_blocks(x: Tensor, spec: PackedSpec) -> tuple[Tensor, Tensor]:
    """Returns x in e4m3 [n rounded up to 8, depth] in the order of a k tile, and a scale for each row and `spec.block`
    inputs, float32 [groups, n rounded up to 8]."""
    rows = -(-len(x) // _ROWS_TOGETHER) * _ROWS_TOGETHER
    codes = torch.empty(rows, spec.depth, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(spec.groups, rows, dtype=torch.float32, device=x.device)
    sizes = map(np.int32, (len(x), x.shape[1], spec.groups, rows))
    launch(_kernel("quantise_groups", 1, x.dtype), (-(-rows * spec.groups // 16),), 256, (x, codes, scales, *sizes))
    return codes, scales


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        yield from (_kernel(name, floats, dtype) for floats in (0, 1) for name in ("quantise", "quantise_narrow"))
        yield _kernel("quantise_groups", 1, dtype)


def _kernel(name: str, floats: int, dtype: torch.dtype) -> Kernel:
    return kernel("linear/quantise_input.cu", name, BITS=8, FLOATS=floats, **element_macro(dtype))
