"""Matrix products of up to 8 rows of x with weights in rows: the shape of the blocks of skinny.cu, and its launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from allspan.kernels.cuda.jit.modules import HALVES, Gpu, Kernel, kernel, launch, shared_limit
from allspan.kernels.cuda.linear.call import LinearCall, OneRowAdapter, Output
from allspan.kernels.cuda.linear.macros import common_specs, gemm_macros, gemm_sizes, groups_of_k_tile, k_tiles
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import qparams_of

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

MOST_ROWS = 8
"""Rows of a tile, which one product on tensor cores takes; up to here reading the weight alone bounds the time."""


def run(call: LinearCall) -> None:
    """Multiplies up to 8 rows of x; more only of a weight without inputs, of which no more than the bias is left."""
    if call.rows > MOST_ROWS:
        for rows in (slice(at, at + MOST_ROWS) for at in range(0, call.rows, MOST_ROWS)):
            run(replace(call, x=call.x[rows], output=replace(call.output, out=call.output.out[rows])))
        return
    spec, output, device, x = call.spec, call.output, call.gpu, call.padded_x()
    form = _form(spec, len(x), output, device)
    blocks = min(form.blocks * device.multiprocessors, output.width(spec))  # each has an equal share of the features
    qparams = qparams_of(call.weight, spec)
    arguments: tuple[Any, ...] = (call.weight, qparams, x, call.bias, output.out, *gemm_sizes(x, spec, output))
    shared = form.launch_bytes(spec, len(x), device)
    if call.adapter is not None:
        arguments = *arguments, call.adapter.argument
        shared = max(shared, _bytes_with(form, call.adapter, spec))
    what = _kernel(spec, form, x.dtype, call.adapter is not None)
    launch(what, (blocks,), form.warps * 32, arguments, shared, is_early=True)


def takes_adapter(call: LinearCall, adapter: OneRowAdapter) -> bool:
    """Whether `run` takes this adapter: of one row and 16-bit elements, where there is shared memory for it."""
    spec, width = call.spec, call.output.width(call.spec)
    if call.rows != 1 or spec.kind.bits < 16 or spec.k_offset or 0 in (spec.inputs, width):
        return False
    return _bytes_with(_form(spec, 1, call.output, call.gpu), adapter, spec) <= call.gpu.shared_bytes


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    device = Gpu(132, shared_limit(capability), capability)
    for dtype in HALVES:
        for spec in common_specs(dtype):
            for parts in (1, 2):
                passing = (_passing(spec, parts, rows, steps, device) for rows in (1, MOST_ROWS) for steps in (1, 4, 8))
                forms = dict.fromkeys((*_forms(spec, parts), *passing))
                yield from (_kernel(spec, form, dtype) for form in forms)
                if spec.kind.bits == 16:
                    yield from (_kernel(spec, form, dtype, is_adapted=True) for form in forms)


@dataclass(frozen=True, slots=True)
class _Form:
    """The shape of the thread blocks of `skinny`: its macros."""

    tiles: int
    parts: int
    resident: int
    whole: int = 0
    warps: int = 16
    stages: int = 4
    blocks: int = 1
    """Blocks of a multiprocessor."""

    def shared_bytes(self, spec: PackedSpec, rows: int) -> int:
        sets, k_tile_groups = 16 // spec.kind.bits, groups_of_k_tile(spec)
        stage = self.parts * 1024 + k_tile_groups * self.parts * 64 + (0 if self.resident else self.tiles * sets * 512)
        sums = 2 * rows * (self.parts * 16 + 4) * 4 + self.tiles * (4 if self.whole else 8) * 4
        of_groups = k_tiles(spec) * max(1, k_tile_groups) * rows * 8 if self.whole else 0
        x = rows * (k_tiles(spec) * sets | 1) * 64 if self.resident else 0
        return self.warps * (self.stages * stage + sums) + of_groups + x

    def launch_bytes(self, spec: PackedSpec, rows: int, device: Gpu) -> int:
        """Returns the bytes of shared memory with which no more than `blocks` fit on a multiprocessor."""
        all_bytes = device.shared_bytes + 1024
        least = (all_bytes // (self.blocks + 1) - 1024 + 16) // 16 * 16
        return max(self.shared_bytes(spec, rows), min(least, device.shared_bytes))


def _form(spec: PackedSpec, rows: int, output: Output, device: Gpu) -> _Form:
    """Returns the first form that fits: x as integers for integer weights, where it fits into shared memory."""
    each = -(-output.width(spec) // device.multiprocessors)
    parts = 2 if output.is_gated or each > 16 else 1
    for form in _forms(spec, parts):
        fits = form.shared_bytes(spec, rows) <= device.shared_bytes and rows <= form.tiles * (4 if form.whole else 8)
        if fits and (form.whole or form.resident == (each > 16 * parts)):
            return form
    passes = -(-each // 16) if output.is_gated else -(-each // (16 * parts))
    return _passing(spec, parts, rows, passes * -(-k_tiles(spec) // 16), device)


def _forms(spec: PackedSpec, parts: int) -> Iterator[_Form]:
    """Yields the forms in which x stays in shared memory, best first."""
    if spec.kind.bits < 16 and not spec.kind.is_float:
        yield from (_Form(tiles, parts, 1, 1, stages=stages) for tiles in (1, 2) for stages in (4, 3))
    yield from (_Form(1, parts, 1, stages=stages) for stages in (4, 3))


def _passing(spec: PackedSpec, parts: int, rows: int, steps: int, device: Gpu) -> _Form:
    """Returns the form in which x comes along with the weight. Of 16 bits, all `steps` of a warp are on their way
    before the kernel ahead has ended, if there is room."""
    more = [count for count in (7, 5) if count <= steps + 1] if spec.kind.bits == 16 else []
    forms = (_Form(1, parts, 0, warps=warps, stages=stages) for warps in (16, 8, 4) for stages in (*more, 4, 3, 2))
    return next(form for form in forms if form.shared_bytes(spec, rows if more else MOST_ROWS) <= device.shared_bytes)


def _bytes_with(form: _Form, adapter: OneRowAdapter, spec: PackedSpec) -> int:
    return form.shared_bytes(spec, 1) + form.warps * adapter.sums * 4


def _kernel(spec: PackedSpec, form: _Form, dtype: torch.dtype, is_adapted: bool = False) -> Kernel:
    also = {"ADAPTED": 1} if is_adapted else {}
    macros = also | {"TILES": form.tiles, "PARTS": form.parts, "RESIDENT": form.resident, "WHOLE": form.whole}
    sizes = {"WARPS": form.warps, "STAGES": form.stages, "BLOCKS": form.blocks}
    return kernel("linear/gemm/skinny.cu", "skinny", **gemm_macros(spec, dtype), **macros, **sizes)
