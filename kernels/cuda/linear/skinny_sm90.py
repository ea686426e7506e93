"""Products of 33 to 64 rows of x with 4-bit weights in rows, on Hopper: see skinny_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Gpu, Kernel, gpu, kernel, launch, shared_limit
from allspan.kernels.cuda.linear.products import (
    GATED,
    Into,
    common_specs,
    is_float,
    macros_of,
    numbers_of_slab,
    sizes_of,
    slabs,
)
from allspan.kernels.packed import PackedSpec
from allspan.kernels.rows import numbers_of

CAPABILITY = (9, 0)

_WARPGROUPS = 5
"""Most of a block; each has 64 features."""
_FULL = 3
"""Of a block that has as much on its way as a multiprocessor's share of the memory can take."""
_STAGES = 5
"""Steps of five warpgroups that there is shared memory for."""
_TILES = 8
"""Of 8 rows of x."""
_PART_BYTES = 1 << 16
"""Of its weight, what a multiprocessor reads while partial sums go out, come back and are added up."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Tiles of the features, stretches of the inputs, and how many warpgroups a tile needs."""

    tiles: int
    splits: int
    warpgroups: int


def pays(rows: int, spec: PackedSpec, device: Gpu) -> bool:
    """Whether `few_rows` is faster than the kernels for all GPUs."""
    return device.capability == CAPABILITY and spec.kind.bits == 4 and 32 < rows <= 8 * _TILES


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    """x [n, K]: with the lead before it, in rows of whole 16 bytes; see `pays`."""
    device = gpu(x.device)
    cut = cut_of(spec, into, device)
    shape = cut.splits, spec.features, _TILES * 8
    partial = torch.empty(shape, dtype=torch.float32, device=x.device) if cut.splits > 1 else None
    sizes = *sizes_of(x, spec, into), *map(np.int32, (cut.tiles, cut.splits))
    arguments = (weight, numbers_of(weight, spec), x, bias, into.out, partial, *sizes)
    blocks, threads = cut.tiles * cut.splits, cut.warpgroups * 128
    launch(_kernel(spec, x.dtype), (blocks,), threads, arguments, _shared_bytes(spec, cut.warpgroups), is_early=True)
    if partial is not None:
        counts = (len(x), spec.features, into.epilogue, is_float(into.out), into.out.stride(0), into.column, cut.splits)
        added = _kernel(spec, x.dtype, "skinny_sum")
        blocks = -(-into.width(spec) * -(-len(x) // 4) // 256)
        launch(added, (blocks,), 256, (partial, bias, into.out, *map(np.int32, counts)), is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """See variants.py."""
    if capability != CAPABILITY:
        return
    for dtype in HALVES:
        for spec in common_specs(dtype):
            if spec.kind.bits == 4:
                assert _shared_bytes(spec, _WARPGROUPS) <= shared_limit(capability)
                yield from (_kernel(spec, dtype, name) for name in ("skinny_sm90", "skinny_sum"))


def _kernel(spec: PackedSpec, dtype: torch.dtype, name: str = "skinny_sm90") -> Kernel:
    return kernel("linear/skinny_sm90.cu", name, **macros_of(spec, dtype), STAGES=_STAGES)


def cut_of(spec: PackedSpec, into: Into, device: Gpu) -> Cut:
    """What takes the least time, in bytes of the weight a multiprocessor: each block reads its features, and from L2
    all of x; partial sums go out to L2 and come back. Small blocks have too few bytes on their way."""
    multiprocessors = device.multiprocessors
    halves = 2 if into.epilogue == GATED else 1
    width = into.width(spec)
    best: tuple[float, Cut] | None = None
    for splits in range(1, min(8, max(1, slabs(spec) // 4)) + 1):
        waves = -(-width * halves // (_WARPGROUPS * 64 * max(1, multiprocessors // splits)))
        count = min(width, waves * max(1, multiprocessors // splits))
        features = -(-width // count) * halves
        cut = Cut(count, splits, -(-features // 64))
        weight = features * spec.row_bytes / splits * max(1.0, _FULL / cut.warpgroups)
        each = weight + 0.6 * _TILES * 16 * spec.inputs / splits
        partial = 0.6 * 2 * splits * spec.features * _TILES * 32 / multiprocessors
        cost = waves * each + (_PART_BYTES + partial if splits > 1 else 0)
        if cut.warpgroups <= _WARPGROUPS and (best is None or cost < best[0]):
            best = cost, cut
    assert best is not None
    return best[1]


def _shared_bytes(spec: PackedSpec, warpgroups: int) -> int:
    x = _TILES * 2048
    weight = warpgroups * 4 * (1024 + numbers_of_slab(spec) * 64)
    stage = -(-(x + weight) // 1024) * 1024
    return 1024 + max(_STAGES * stage + _TILES * 32, warpgroups * 64 * (_TILES * 8 + 1) * 4)
