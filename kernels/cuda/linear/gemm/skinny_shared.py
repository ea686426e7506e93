"""Matrix products of 9 to 64 rows of x with quantised weights in rows: the shape of the blocks of skinny_shared.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from allspan.kernels.cuda.jit.modules import HALVES, Gpu, Kernel, kernel, launch, shared_limit
from allspan.kernels.cuda.linear import cublas
from allspan.kernels.cuda.linear.call import LinearCall, Output
from allspan.kernels.cuda.linear.gemm import skinny_reduce, skinny_sm90
from allspan.kernels.cuda.linear.macros import common_specs, gemm_macros, gemm_sizes, groups_of_k_tile, k_tiles
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import qparams_of

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_ROWS = 8
"""Rows of x of a tile."""
_MOST_ROWS = 64
"""Most rows; with more, weights are better dequantised first, for cuBLAS."""
_MOST_ROWS_E4M3 = 16
"""Most rows where cuBLAS multiplies e4m3: with more it is faster, although x becomes e4m3, too."""
_LAUNCH_BYTES = 8 << 20
"""What a GPU reads in the time that one more kernel takes to begin and end: 2 µs."""
_REGISTERS = {2: 12, 4: 8, 8: 8}
"""Warps of a multiprocessor whose sums fit into its registers, by the tiles of rows."""


def takes(rows: int, spec: PackedSpec, device: Gpu) -> bool:
    """Whether `run` takes so many rows of x with such a weight; before sm_80, with less shared memory, half as many."""
    if spec.kind.bits == 16:
        return False
    most = _MOST_ROWS_E4M3 if cublas.multiplies_e4m3(spec, device) else _MOST_ROWS
    return rows <= (most if device.capability >= (8, 0) else most // 2)


def run(call: LinearCall) -> None:
    """Multiplies up to 64 rows of x; `skinny_reduce` adds up the tiles that blocks share."""
    spec, output, device, x = call.spec, call.output, call.gpu, call.padded_x()
    tiles = 2 if len(x) <= 16 else 4 if len(x) <= 32 else 8
    shape = _shape(spec, tiles, device, x.dtype)
    share = _share(spec, output, shape, device.multiprocessors)
    floats = share.blocks * 2 * shape.features * tiles * _ROWS if share.rest else 0
    partial = torch.empty(floats, dtype=torch.float32, device=x.device) if floats else None
    line = map(np.int32, (share.tiles, share.steps, share.waves, share.rest))
    weight = call.weight, qparams_of(call.weight, spec)
    arguments = (*weight, x, call.bias, output.out, partial, *gemm_sizes(x, spec, output), *line)
    launch(shape.kernel, (share.blocks,), shape.warps * 32, arguments, shape.shared, is_early=True)
    if partial is not None:
        line = map(np.int32, (tiles, share.tiles, share.steps, share.rest, share.blocks))
        skinny_reduce.run(partial, call, (*line,), (share.rest * tiles,), shape.warps * 32)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    device = Gpu(132, shared_limit(capability), capability)
    for dtype in HALVES:
        for spec in common_specs(dtype):
            for tiles in (2, 4, 8):
                least, most = tiles // 2 * _ROWS + 1, tiles * _ROWS
                if takes(least, spec, device) and not skinny_sm90.takes(most, spec, device):
                    yield _shape(spec, tiles, device, dtype).kernel


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of the thread blocks of `skinny_shared`, and its kernel."""

    kernel: Kernel
    warps: int
    blocks: int
    """Blocks of a multiprocessor."""
    shared: int
    """Bytes of shared memory of a block."""

    @property
    def features(self) -> int:
        return self.warps * 32


def _shape(spec: PackedSpec, tiles: int, device: Gpu, dtype: torch.dtype) -> _Shape:
    """Returns the shape for `tiles` of 8 rows.

    A block has so many features that it reads no more of x than of the weight. As many blocks share a multiprocessor as
    have the registers for their sums, if there is shared memory for three steps of each.
    """
    bits = spec.kind.bits
    wanted = 8 if tiles * _ROWS * 16 // bits > 128 else 4  # 2 bytes a row, and bits / 8 of 32 features a warp
    x_bytes = tiles * _ROWS * (512 // bits) * 2
    warp_bytes = 2048 + groups_of_k_tile(spec) * 128
    sum_bytes = 2 * max(1, groups_of_k_tile(spec)) * tiles * _ROWS * 4
    for warps in (wanted, 4):
        for blocks in range(max(1, _REGISTERS[tiles] // warps), 0, -1):
            limit = (device.shared_bytes + 1024) // blocks - 1024 - sum_bytes
            stages = min(6, limit // (x_bytes + warps * warp_bytes))
            if stages >= 3:
                macros = {"TILES": tiles, "WARPS": warps, "STAGES": stages, "BLOCKS": blocks}
                shared = stages * (x_bytes + warps * warp_bytes) + sum_bytes
                made = kernel("linear/gemm/skinny_shared.cu", "skinny_shared", **gemm_macros(spec, dtype), **macros)
                return _Shape(made, warps, blocks, shared)
    raise AssertionError


@dataclass(frozen=True, slots=True)
class StreamK:
    """How tiles are shared out over thread blocks: `StreamK` of stream_k.cuh."""

    tiles: int
    steps: int
    waves: int
    rest: int
    blocks: int


def _share(spec: PackedSpec, output: Output, shape: _Shape, multiprocessors: int) -> StreamK:
    """Returns the shares of the blocks.

    The last tiles are split over all blocks if those without a tile would stand still for longer than partial sums take
    to go out and come back, and the kernel that adds them up to run.
    """
    tiles = -(-output.width(spec) // (shape.features // 2 if output.is_gated else shape.features))
    steps = k_tiles(spec)
    blocks = multiprocessors * shape.blocks
    waves, rest = divmod(tiles, blocks)
    lost = (blocks - rest) * shape.features * spec.row_bytes
    partial = (blocks + rest) * shape.features * dict(shape.kernel.defines)["TILES"] * _ROWS * 4
    if rest and lost > 2 * partial + _LAUNCH_BYTES:
        if waves == 0:
            blocks = min(blocks, rest * steps)
        return StreamK(tiles, steps, waves, rest, blocks)
    return StreamK(tiles, steps, waves + (rest > 0), 0, min(blocks, tiles))
