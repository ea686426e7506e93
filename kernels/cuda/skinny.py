"""Products of few rows of x with weights in rows: which kernel, in which shape, on how many thread blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.modules import Gpu, Kernel, gpu, kernel, launch, shared_limit
from allspan.kernels.packed import PackedSpec
from allspan.kernels.rows import numbers_of

FEW_ROWS = {16: 64, 8: 64, 4: 64}
"""By the bits of a code, the most rows that are not left to cuBLAS, which would need codes as bfloat16 first."""

STORE, ADD, GATED = 0, 1, 2

_ROWS = 8
"""Of a tile: rows of x that one product on tensor cores takes."""
_LAUNCH_BYTES = 8 << 20
"""What a GPU reads in the time that one more kernel takes to begin and end: 2 µs."""
_REGISTERS = {2: 12, 4: 8, 8: 8}
"""By the tiles of rows, warps of a multiprocessor whose sums fit into its registers."""


@dataclass(frozen=True, slots=True)
class Into:
    """Where a product goes, and what becomes of it there."""

    out: Tensor
    column: int
    epilogue: int

    def width(self, spec: PackedSpec) -> int:
        return spec.parts[0] if self.epilogue == GATED else spec.features

    def view(self, spec: PackedSpec) -> Tensor:
        return self.out[:, self.column : self.column + self.width(spec)]


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    """x [n, K]: with the lead before it, in rows of whole 16 bytes; n is up to `FEW_ROWS`."""
    if len(x) <= _ROWS or spec.inputs == 0:
        _one_tile(x, weight, bias, spec, into)
    else:
        _more_tiles(x, weight, bias, spec, into)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    device = Gpu(0, shared_limit(capability), capability)
    sizes = {
        "bf16": (0,),
        "fp8": (0,),
        "fp8_block": (0,),
        "channel8": (0,),
        "channel4": (0,),
        "group8": (32, 64),
        "group4": (32, 64, 128),
    }
    for name, group in ((name, group) for name, all_of in sizes.items() for group in all_of):
        spec = PackedSpec(name, "", (), 0, group=group, memory="rows")
        yield from (_skinny(spec, is_wide)[0] for is_wide in (False, True))
        yield from (_shape(spec, tiles, device).kernel for tiles in (2, 4, 8))
    yield _REDUCE


_REDUCE = kernel("skinny_reduce.cu", "skinny_reduce")


def _one_tile(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    """The warps of a block take its features' inputs in turn: no partial sums leave it."""
    width = into.width(spec)
    is_wide = into.epilogue == GATED or width >= 64 * gpu(x.device).multiprocessors
    blocks = -(-width // (32 if is_wide and into.epilogue != GATED else 16)) * -(-len(x) // _ROWS)
    skinny, warps, warp_bytes = _skinny(spec, is_wide)
    arguments = (weight, numbers_of(weight, spec), x, bias, into.out, *_sizes(x, spec, into))
    launch(skinny, (blocks,), warps * 32, arguments, warps * warp_bytes, is_early=True)


def _skinny(spec: PackedSpec, is_wide: bool) -> tuple[Kernel, int, int]:
    """And its warps, and the bytes of shared memory of one: its stages, or later its sums."""
    parts, warps, stages = (2, 4, 4) if is_wide else (1, 8, 8)
    if spec.kind.bits == 4 and not is_wide:
        warps, stages = 16, 4  # there is more to do for each byte
    macros = _macros(spec)
    numbers = _numbers(spec) * parts * 16
    floats = parts * 8 * 20 + 8
    skinny = kernel("skinny.cu", "skinny", **macros, PARTS=parts, WARPS=warps, STAGES=stages)
    return skinny, warps, max(stages * (parts * 1024 + numbers * 4), floats * 4)


def _more_tiles(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    tiles = 2 if len(x) <= 16 else 4 if len(x) <= 32 else 8
    shape = _shape(spec, tiles, gpu(x.device))
    share = _share(spec, into, shape, gpu(x.device).multiprocessors)
    floats = share.blocks * 2 * shape.features * tiles * _ROWS if share.rest else 0
    partial = torch.empty(floats, dtype=torch.float32, device=x.device) if floats else None
    numbers = numbers_of(weight, spec)
    line = (share.tiles, share.steps, share.waves, share.rest)
    arguments = (weight, numbers, x, bias, into.out, partial, *_sizes(x, spec, into), *map(np.int32, line))
    launch(shape.kernel, (share.blocks,), shape.warps * 32, arguments, shape.shared, is_early=True)
    if partial is not None:
        sizes = (len(x), into.width(spec), into.epilogue, is_float(into.out), into.out.stride(0), into.column, tiles)
        line = (share.tiles, share.steps, share.rest, share.blocks)
        arguments = (partial, bias, into.out, *map(np.int32, sizes), *map(np.int32, line))
        launch(_REDUCE, (share.rest * tiles,), shape.warps * 32, arguments, is_early=True)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of blocks of `skinny_shared`."""

    kernel: Kernel
    warps: int
    blocks: int
    """Of a multiprocessor."""
    shared: int
    """Bytes."""

    @property
    def features(self) -> int:
        return self.warps * 32


def _shape(spec: PackedSpec, tiles: int, device: Gpu) -> _Shape:
    """So many features a block that what it reads of x is no more than what it reads of the weight; as many blocks as
    have the registers for their sums, if there is shared memory for three steps of each."""
    bits = spec.kind.bits
    wanted = 8 if tiles * _ROWS * 16 // bits > 128 else 4  # 2 bytes a row, and bits / 8 of 32 features a warp
    slabs_of_step = 2 if bits == 16 else 1
    x_bytes = tiles * _ROWS * slabs_of_step * (512 // bits) * 2
    warp_bytes = slabs_of_step * 2048 + _numbers(spec) * 128
    sum_bytes = 2 * max(1, _numbers(spec)) * tiles * _ROWS * 4
    for warps in (wanted, 4):
        for blocks in range(max(1, _REGISTERS[tiles] // warps), 0, -1):
            limit = (device.shared_bytes + 1024) // blocks - 1024 - sum_bytes
            stages = min(6, limit // (x_bytes + warps * warp_bytes))
            if stages >= 3:
                macros = {"TILES": tiles, "WARPS": warps, "STAGES": stages, "BLOCKS": blocks}
                shared = stages * (x_bytes + warps * warp_bytes) + sum_bytes
                return _Shape(
                    kernel("skinny_shared.cu", "skinny_shared", **_macros(spec), **macros), warps, blocks, shared
                )
    raise AssertionError


@dataclass(frozen=True, slots=True)
class _Share:
    """See `Shares` of products.cuh."""

    tiles: int
    steps: int
    waves: int
    rest: int
    blocks: int


def _share(spec: PackedSpec, into: Into, shape: _Shape, multiprocessors: int) -> _Share:
    """The last tiles are shared if that many blocks would stand still for longer than partial sums take to go out and
    come back, and their kernel to run."""
    tiles = -(-into.width(spec) // (shape.features // 2 if into.epilogue == GATED else shape.features))
    steps = -(-slabs(spec) // 2) if spec.kind.bits == 16 else slabs(spec)
    blocks = multiprocessors * shape.blocks
    waves, rest = divmod(tiles, blocks)
    lost = (blocks - rest) * shape.features * spec.row_bytes
    partial = (blocks + rest) * shape.features * dict(shape.kernel.defines)["TILES"] * _ROWS * 4
    if rest and lost > 2 * partial + _LAUNCH_BYTES:
        if waves == 0:
            blocks = min(blocks, rest * steps)
        return _Share(tiles, steps, waves, rest, blocks)
    return _Share(tiles, steps, waves + (rest > 0), 0, min(blocks, tiles))


def _sizes(x: Tensor, spec: PackedSpec, into: Into) -> Iterator[np.int32]:
    sizes = (len(x), spec.features, x.shape[1], slabs(spec), groups(spec)[1], into.epilogue, is_float(into.out))
    return map(np.int32, (*sizes, x.stride(0), into.out.stride(0), into.column))


def _macros(spec: PackedSpec) -> dict[str, int]:
    return bits_of(spec) | {"GROUP_SETS": min(group_sets(spec), 16 // spec.kind.bits)}


def _numbers(spec: PackedSpec) -> int:
    """Groups that a slab has a part of, if numbers are a group's."""
    sets = 16 // spec.kind.bits
    return sets // min(group_sets(spec), sets) if group_sets(spec) else 0


def bits_of(spec: PackedSpec) -> dict[str, int]:
    """Macros of codes.cuh."""
    return {"BITS": spec.kind.bits, "FLOATS": int(spec.kind.is_e4m3)}


def group_sets(spec: PackedSpec) -> int:
    """Sets of 32 inputs that share numbers, 0 where all do."""
    return spec.block // 32 if spec.kind.scale_bytes else 0


def groups(spec: PackedSpec) -> tuple[int, int]:
    """How many there are, and their sets."""
    return spec.groups, max(1, group_sets(spec))


def slabs(spec: PackedSpec) -> int:
    """Of 64 bytes, that a feature's codes are."""
    return spec.depth * spec.kind.bits // 512


def is_float(out: Tensor) -> int:
    return int(out.dtype == torch.float32)
