"""The first product of low-rank adapters on a GPU, to float32 sums of parts of the inputs: shrink.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.cuda.adapters.route import check_routing
from allspan.kernels.cuda.jit.modules import HALVES, Gpu, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.linear.macros import k_tiles
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import FLOATS

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_FEW_ROWS = 256
"""Rows up to which blocks have a single tile of features: what counts is that all of the GPU reads matrices."""
_FEWEST, _MANY = 64, 4
"""Rows up to which blocks have a single tile of them, and tiles of many rows."""
_SETS, _MANY_SETS, _MOST_SPLITS = 32, 16, 20
"""Sets of 32 inputs that a block of few and of many rows asks for at once, and parts of the inputs at most."""


def shrink(x: Tensor, a: Tensor, spec: PackedSpec, routing: Routing[Tensor]) -> Tensor:
    """Returns float32 [splits, n, features], whose sum over the splits is x · a[place]ᵀ in rows that have a place.

    Other rows hold anything. x [n, K] of 16 bits; a uint8 [places, *spec.shape], in rows of x's type.
    """
    _check(x, a, spec, routing)
    n, places, sets = len(x), len(a), k_tiles(spec)
    row_tiles, feature_tiles = _tiles(n, spec)
    splits = splits_of(n, spec, gpu(x.device))
    sums = torch.empty(splits, n, spec.features, dtype=torch.float32, device=x.device)
    if sums.numel() == 0:
        return sums
    if spec.inputs % 8 or x.data_ptr() % 16 or x.stride(0) % 8:
        x = functional.pad(x, (0, -spec.inputs % 8))
    blocks = -(-n // (8 * row_tiles)), -(-spec.features // (16 * feature_tiles)), splits
    sizes = (places, n, spec.features, x.shape[1], sets, x.stride(0))
    arguments = (a, x, routing.places, routing.slots, sums, *map(np.int32, sizes))
    shared = 8 * 8 * row_tiles * (16 * feature_tiles + 4) * 4
    launch(_kernel(x.dtype, row_tiles, feature_tiles), blocks, 256, arguments, shared, is_early=True)
    return sums


def splits_of(n: int, spec: PackedSpec, device: Gpu) -> int:
    """Returns the number of parts of the inputs that `shrink` has for n rows: as many as let blocks ask for all at
    once, or for twice as much and so on, where a multiprocessor has no room for so many."""
    row_tiles, feature_tiles = _tiles(n, spec)
    beside = -(-n // (8 * row_tiles)) * -(-spec.features // (16 * feature_tiles))
    most = max(1, min(_MOST_SPLITS, (3 if row_tiles == 1 else 2) * device.multiprocessors // max(1, beside)))
    each = _SETS if n <= _FEW_ROWS else _MANY_SETS
    rounds = -(-k_tiles(spec) // (each * most))
    return max(1, -(-k_tiles(spec) // (each * max(1, rounds))))


def _tiles(n: int, spec: PackedSpec) -> tuple[int, int]:
    """Returns the tiles of rows and of features of a block."""
    if n <= _FEW_ROWS:
        return 1 if n <= _FEWEST else 2, 1
    return _MANY, min(3, -(-spec.features // 16))


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        yield from (_kernel(dtype, rows, 1) for rows in (1, 2))
        yield from (_kernel(dtype, _MANY, features) for features in (1, 2, 3))


def _kernel(dtype: torch.dtype, row_tiles: int, feature_tiles: int) -> Kernel:
    tiles = {"ROW_TILES": row_tiles, "FEATURE_TILES": feature_tiles}
    return kernel("adapters/shrink.cu", "shrink", **tiles, **element_macro(dtype))


def _check(x: Tensor, a: Tensor, spec: PackedSpec, routing: Routing[Tensor]) -> None:
    """Raises ValueError unless `a` are first matrices that x meets."""
    if x.dtype not in HALVES or x.shape[1:] != (spec.inputs,) or x.stride(1) != 1:
        raise ValueError(f"x: {x.dtype} {list(x.shape)} is not bfloat16 or float16 [n, {spec.inputs}]")
    if FLOATS.get(spec.format) != x.dtype or spec.memory != "rows" or spec.k_offset:
        raise ValueError(f"a: {spec} is no matrix of {x.dtype} in rows")
    if a.dtype != torch.uint8 or tuple(a.shape[1:]) != spec.shape or not a.is_contiguous():
        raise ValueError(f"a: {a.dtype} {list(a.shape)} is not [places, *spec.shape] of {spec}")
    check_routing(routing, len(x), len(a))
