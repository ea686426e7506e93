"""Products of few rows of x with weights in rows: which kernel, in which shape, on how many thread blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Gpu, Kernel, element_macro, gpu, kernel, launch, shared_limit
from allspan.kernels.cuda.linear import gemv, skinny_sm90
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

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_ROWS = 8
"""Of a tile: rows of x that one product on tensor cores takes; so many are bound by reading the weight alone."""
_E4M3_ROWS = 16
"""From more on, cuBLAS is faster, with x as e4m3, too."""
_MOST_ROWS = 64
"""From more on, codes are better decoded first, for cuBLAS."""
_LAUNCH_BYTES = 8 << 20
"""What a GPU reads in the time that one more kernel takes to begin and end: 2 µs."""
_REGISTERS = {2: 12, 4: 8, 8: 8}
"""By the tiles of rows, warps of a multiprocessor whose sums fit into its registers."""


def is_few(rows: int, spec: PackedSpec, device: Gpu) -> bool:
    """Whether `few_rows` is for them."""
    if spec.kind.bits == 16:
        return rows <= _ROWS
    most = _E4M3_ROWS if multiplies_e4m3(spec, device) else _MOST_ROWS
    return rows <= (most if device.capability >= (8, 0) else most // 2)  # below it, of shared memory there is less


def multiplies_e4m3(spec: PackedSpec, device: Gpu) -> bool:
    """Whether cuBLAS takes such codes as they are; whether it takes blocks of them hangs on its version, too."""
    since = {"fp8": device.capability >= (8, 9), "fp8_block": device.capability == (9, 0)}
    return since.get(spec.format, False)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    """x [n, K]: with the lead before it, in rows of whole 16 bytes; see `is_few`."""
    if len(x) == 1 and gemv.takes(spec, into, gpu(x.device)):
        gemv.one_row(x, weight, bias, spec, into)
    elif len(x) <= _ROWS:
        _streamed(x, weight, bias, spec, into)
    elif spec.inputs == 0:
        for rows in (slice(at, at + _ROWS) for at in range(0, len(x), _ROWS)):
            _streamed(x[rows], weight, bias, spec, Into(into.out[rows], into.column, into.epilogue))
    elif skinny_sm90.pays(len(x), spec, gpu(x.device)):
        skinny_sm90.few_rows(x, weight, bias, spec, into)
    else:
        _more_tiles(x, weight, bias, spec, into)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    device = Gpu(132, shared_limit(capability), capability)
    for dtype in HALVES:
        for spec in common_specs(dtype):
            for parts in (1, 2):
                forms = (*_forms(spec, parts), _passing(spec, parts, device))
                yield from (_kernel(spec, form, dtype) for form in forms)
            for tiles in (2, 4, 8):
                if is_few(tiles // 2 * _ROWS + 1, spec, device) and not skinny_sm90.pays(tiles * _ROWS, spec, device):
                    yield _shape(spec, tiles, device, dtype).kernel
        yield _reduce_kernel(dtype)


def _reduce_kernel(dtype: torch.dtype) -> Kernel:
    return kernel("linear/skinny_reduce.cu", "skinny_reduce", **element_macro(dtype))


@dataclass(frozen=True, slots=True)
class _Form:
    """Of blocks of `skinny`: its macros."""

    tiles: int
    parts: int
    resident: int
    whole: int = 0
    warps: int = 16
    stages: int = 4
    blocks: int = 1
    """Of a multiprocessor."""

    def shared_bytes(self, spec: PackedSpec, rows: int) -> int:
        sets, numbers = 16 // spec.kind.bits, numbers_of_slab(spec)
        stage = self.parts * 1024 + numbers * self.parts * 64 + (0 if self.resident else self.tiles * sets * 512)
        sums = 2 * rows * (self.parts * 16 + 4) * 4 + self.tiles * (4 if self.whole else 8) * 4
        of_groups = slabs(spec) * max(1, numbers) * rows * 8 if self.whole else 0
        x = rows * (slabs(spec) * sets | 1) * 64 if self.resident else 0
        return self.warps * (self.stages * stage + sums) + of_groups + x

    def launch_bytes(self, spec: PackedSpec, rows: int, device: Gpu) -> int:
        """So many that no more than `blocks` are on a multiprocessor, or others would have fewer."""
        all_bytes = device.shared_bytes + 1024
        least = (all_bytes // (self.blocks + 1) - 1024 + 16) // 16 * 16
        return max(self.shared_bytes(spec, rows), min(least, device.shared_bytes))


def _form(spec: PackedSpec, rows: int, into: Into, device: Gpu) -> _Form:
    """Codes that are whole numbers meet x as such, where it fits into shared memory."""
    each = -(-into.width(spec) // device.multiprocessors)
    parts = 2 if into.epilogue == GATED or each > 16 else 1
    for form in _forms(spec, parts):
        fits = form.shared_bytes(spec, rows) <= device.shared_bytes and rows <= form.tiles * (4 if form.whole else 8)
        if fits and (form.whole or form.resident == (each > 16 * parts)):
            return form
    return _passing(spec, parts, device)


def _forms(spec: PackedSpec, parts: int) -> Iterator[_Form]:
    """In which x stays in shared memory, best first."""
    if spec.kind.bits < 16 and not spec.kind.is_e4m3:
        yield from (_Form(tiles, parts, 1, 1, stages=stages) for tiles in (1, 2) for stages in (4, 3))
    yield from (_Form(1, parts, 1, stages=stages) for stages in (4, 3))


def _passing(spec: PackedSpec, parts: int, device: Gpu) -> _Form:
    """x comes along with the weight."""
    forms = (_Form(1, parts, 0, warps=warps, stages=stages) for warps in (16, 8, 4) for stages in (4, 3, 2))
    return next(form for form in forms if form.shared_bytes(spec, _ROWS) <= device.shared_bytes)


def _streamed(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    """All blocks are there at once, with an equal share of the features each."""
    device = gpu(x.device)
    form = _form(spec, len(x), into, device)
    blocks = min(form.blocks * device.multiprocessors, into.width(spec))
    arguments = (weight, numbers_of(weight, spec), x, bias, into.out, *sizes_of(x, spec, into))
    shared = form.launch_bytes(spec, len(x), device)
    launch(_kernel(spec, form, x.dtype), (blocks,), form.warps * 32, arguments, shared, is_early=True)


def _kernel(spec: PackedSpec, form: _Form, dtype: torch.dtype) -> Kernel:
    macros = {"TILES": form.tiles, "PARTS": form.parts, "RESIDENT": form.resident, "WHOLE": form.whole}
    sizes = {"WARPS": form.warps, "STAGES": form.stages, "BLOCKS": form.blocks}
    return kernel("linear/skinny.cu", "skinny", **macros_of(spec, dtype), **macros, **sizes)


def _more_tiles(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    tiles = 2 if len(x) <= 16 else 4 if len(x) <= 32 else 8
    shape = _shape(spec, tiles, gpu(x.device), x.dtype)
    share = _share(spec, into, shape, gpu(x.device).multiprocessors)
    floats = share.blocks * 2 * shape.features * tiles * _ROWS if share.rest else 0
    partial = torch.empty(floats, dtype=torch.float32, device=x.device) if floats else None
    numbers = numbers_of(weight, spec)
    line = (share.tiles, share.steps, share.waves, share.rest)
    arguments = (weight, numbers, x, bias, into.out, partial, *sizes_of(x, spec, into), *map(np.int32, line))
    launch(shape.kernel, (share.blocks,), shape.warps * 32, arguments, shape.shared, is_early=True)
    if partial is not None:
        sizes = (len(x), into.width(spec), into.epilogue, is_float(into.out), into.out.stride(0), into.column, tiles)
        line = (share.tiles, share.steps, share.rest, share.blocks)
        arguments = (partial, bias, into.out, *map(np.int32, sizes), *map(np.int32, line))
        launch(_reduce_kernel(x.dtype), (share.rest * tiles,), shape.warps * 32, arguments, is_early=True)


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


def _shape(spec: PackedSpec, tiles: int, device: Gpu, dtype: torch.dtype) -> _Shape:
    """So many features a block that what it reads of x is no more than what it reads of the weight; as many blocks as
    have the registers for their sums, if there is shared memory for three steps of each."""
    bits = spec.kind.bits
    wanted = 8 if tiles * _ROWS * 16 // bits > 128 else 4  # 2 bytes a row, and bits / 8 of 32 features a warp
    x_bytes = tiles * _ROWS * (512 // bits) * 2
    warp_bytes = 2048 + numbers_of_slab(spec) * 128
    sum_bytes = 2 * max(1, numbers_of_slab(spec)) * tiles * _ROWS * 4
    for warps in (wanted, 4):
        for blocks in range(max(1, _REGISTERS[tiles] // warps), 0, -1):
            limit = (device.shared_bytes + 1024) // blocks - 1024 - sum_bytes
            stages = min(6, limit // (x_bytes + warps * warp_bytes))
            if stages >= 3:
                macros = {"TILES": tiles, "WARPS": warps, "STAGES": stages, "BLOCKS": blocks}
                shared = stages * (x_bytes + warps * warp_bytes) + sum_bytes
                made = kernel("linear/skinny_shared.cu", "skinny_shared", **macros_of(spec, dtype), **macros)
                return _Shape(made, warps, blocks, shared)
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
    steps = slabs(spec)
    blocks = multiprocessors * shape.blocks
    waves, rest = divmod(tiles, blocks)
    lost = (blocks - rest) * shape.features * spec.row_bytes
    partial = (blocks + rest) * shape.features * dict(shape.kernel.defines)["TILES"] * _ROWS * 4
    if rest and lost > 2 * partial + _LAUNCH_BYTES:
        if waves == 0:
            blocks = min(blocks, rest * steps)
        return _Share(tiles, steps, waves, rest, blocks)
    return _Share(tiles, steps, waves + (rest > 0), 0, min(blocks, tiles))
