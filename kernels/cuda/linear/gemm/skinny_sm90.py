"""Matrix products of 33 to 64 rows of x with 4-bit weights in rows, on Hopper: see skinny_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from allspan.kernels.cuda.jit.modules import HALVES, Gpu, Kernel, kernel, launch, shared_limit
from allspan.kernels.cuda.linear.call import LinearCall, Output, is_float
from allspan.kernels.cuda.linear.macros import common_specs, gemm_macros, gemm_sizes, groups_of_k_tile, k_tiles
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import qparams_of

CAPABILITY = (9, 0)

_WARPGROUPS = 5
"""Most warpgroups of a block; each has 64 features."""
_FULL = 3
"""Warpgroups of a block that has as much on its way as a multiprocessor's share of the memory can take."""
_STAGES = 5
"""Steps of five warpgroups that there is shared memory for."""
_TILES = 8
"""Tiles of 8 rows of x."""
_PART_BYTES = 1 << 16
"""Bytes of its weight that a multiprocessor reads while partial sums go out, come back and are added up."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Tiles of the features, stretches of the inputs, and how many warpgroups a tile needs."""

    tiles: int
    splits: int
    warpgroups: int


def takes(rows: int, spec: PackedSpec, device: Gpu) -> bool:
    """Whether `run` is faster than the kernels for all GPUs."""
    return (
        device.capability == CAPABILITY and spec.kind.bits == 4 and not spec.kind.is_float and 32 < rows <= 8 * _TILES
    )


def run(call: LinearCall) -> None:
    """Multiplies 33 to 64 rows of x; see `takes`."""
    spec, output, x = call.spec, call.output, call.padded_x()
    out, cut = output.out, cut_of(spec, output, call.gpu)
    shape = cut.splits, spec.features, _TILES * 8
    partial = torch.empty(shape, dtype=torch.float32, device=x.device) if cut.splits > 1 else None
    sizes = *gemm_sizes(x, spec, output), *map(np.int32, (cut.tiles, cut.splits))
    arguments = (call.weight, qparams_of(call.weight, spec), x, call.bias, out, partial, *sizes)
    blocks, threads = cut.tiles * cut.splits, cut.warpgroups * 128
    launch(_kernel(spec, x.dtype), (blocks,), threads, arguments, _shared_bytes(spec, cut.warpgroups), is_early=True)
    if partial is not None:
        counts = (len(x), spec.features, output.epilogue, is_float(out), out.stride(0), output.column, cut.splits)
        added = _kernel(spec, x.dtype, "skinny_sum")
        blocks = -(-output.width(spec) * -(-len(x) // 4) // 256)
        launch(added, (blocks,), 256, (partial, call.bias, out, *map(np.int32, counts)), is_early=True)


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
    return kernel("linear/gemm/skinny_sm90.cu", name, **gemm_macros(spec, dtype), STAGES=_STAGES)


def cut_of(spec: PackedSpec, output: Output, device: Gpu) -> Cut:
    """Returns the cut that takes the least time, in bytes of the weight a multiprocessor.

    Each block reads its features, and from L2 all of x; partial sums go out to L2 and come back. Small blocks have too
    few bytes on their way.
    """
    multiprocessors = device.multiprocessors
    halves = 2 if output.is_gated else 1
    width = output.width(spec)
    best: tuple[float, Cut] | None = None
    for splits in range(1, min(8, max(1, k_tiles(spec) // 4)) + 1):
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
    weight = warpgroups * 4 * (1024 + groups_of_k_tile(spec) * 64)
    stage = -(-(x + weight) // 1024) * 1024
    return 1024 + max(_STAGES * stage + _TILES * 32, warpgroups * 64 * (_TILES * 8 + 1) * 4)
