"""The first product of low-rank adapters on a GPU, to float32 sums of parts of the inputs: shrink.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.cuda.adapters.route import check_routing
from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.linear.macros import k_tiles
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import FLOATS

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_FEW_ROWS = 256
"""Rows up to which blocks have a single tile of features: what counts is that all of the GPU reads matrices."""
_SETS, _MOST_SPLITS = 40, 16
"""Sets of 32 inputs of a block of few rows, five for each of its warps, and parts of the inputs at most."""
_FEWEST, _MANY = 64, 4
"""Rows up to which blocks have a single tile of them, and tiles of many rows."""
_WAVES = 4
"""Blocks for each multiprocessor: those behind are done by the same ones."""


def shrink(x: Tensor, a: Tensor, spec: PackedSpec, routing: Routing[Tensor]) -> Tensor:
    """Returns float32 [splits, n, features], whose sum over the splits is x · a[place]ᵀ in rows that have a place.

    Other rows hold anything. x [n, K] of 16 bits; a uint8 [places, *spec.shape], in rows of x's type.
    """
    _check(x, a, spec, routing)
    n, places, sets = len(x), len(a), k_tiles(spec)
    row_tiles = 1 if n <= _FEWEST else 2 if n <= _FEW_ROWS else _MANY
    feature_tiles = 1 if n <= _FEW_ROWS else min(3, -(-spec.features // 16))
    tiles = most_tiles(n, places, 8 * row_tiles)
    splits = max(1, min(_MOST_SPLITS, -(-sets // _SETS)))
    if n > _FEW_ROWS:
        splits = min(splits, max(1, 2 * gpu(x.device).multiprocessors // -(-n // (8 * row_tiles))))
    sums = torch.empty(splits, n, spec.features, dtype=torch.float32, device=x.device)
    if sums.numel() == 0:
        return sums
    if spec.inputs % 8 or x.data_ptr() % 16 or x.stride(0) % 8:
        x = functional.pad(x, (0, -spec.inputs % 8))
    others = -(-spec.features // (16 * feature_tiles)), splits
    most = -(-_WAVES * gpu(x.device).multiprocessors // (others[0] * splits))
    blocks = min(tiles, most), *others
    sizes = (places, n, spec.features, x.shape[1], sets, x.stride(0))
    arguments = (a, x, routing.starts, routing.slots, sums, *map(np.int32, sizes))
    shared = 8 * 8 * row_tiles * (16 * feature_tiles + 4) * 4
    launch(_kernel(x.dtype, row_tiles, feature_tiles), blocks, 256, arguments, shared, is_early=True)
    return sums


def most_tiles(rows: int, places: int, each: int) -> int:
    """Returns a number of tiles of up to `each` rows that no routing exceeds."""
    return min(rows, rows // each + places)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        yield from (_kernel(dtype, rows, 1) for rows in (1, 2))
        yield from (_kernel(dtype, _MANY, features) for features in (1, 2, 3))


def _kernel(dtype: torch.dtype, row_tiles: int, feature_tiles: int) -> Kernel:
    tiles = {"ROW_TILES": row_tiles, "FEATURE_TILES": feature_tiles}
    return kernel("adapters/shrink.cu", "shrink", **tiles, **element_macro(dtype))


def _check(x: Tensor, a: Tensor, spec: PackedSpec, routing: Routing[Tensor]) -> None:
    if x.dtype not in HALVES or x.shape[1:] != (spec.inputs,) or x.stride(1) != 1:
        raise ValueError(f"x: {x.dtype} {list(x.shape)} is not bfloat16 or float16 [n, {spec.inputs}]")
    if FLOATS.get(spec.format) != x.dtype or spec.memory != "rows" or spec.k_offset:
        raise ValueError(f"a: {spec} is no matrix of {x.dtype} in rows")
    if a.dtype != torch.uint8 or tuple(a.shape[1:]) != spec.shape or not a.is_contiguous():
        raise ValueError(f"a: {a.dtype} {list(a.shape)} is not [places, *spec.shape] of {spec}")
    check_routing(routing, len(x), len(a))
