"""Matrix-vector products, one row of x with quantised weights in rows: the shape of the blocks of gemv.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from allspan.kernels.cuda.jit.modules import HALVES, Gpu, Kernel, kernel, launch
from allspan.kernels.cuda.linear.call import LinearCall, Output, is_float
from allspan.kernels.cuda.linear.macros import common_specs, gemm_macros, group_sets, groups, k_tiles
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import qparams_of

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_MOST_BYTES = 256 << 20
"""Size of the largest weight: the time of larger ones is that of reading, and `skinny` reads longer pieces."""
_BESIDE_DECODE = 110 << 10
"""Bytes of shared memory that a block may have beside one of paged_decode, behind which it waits with its weight."""


@dataclass(frozen=True, slots=True)
class Form:
    """The shape of the thread blocks of `gemv`: its macros."""

    warps: int
    stages: int
    blocks: int

    def shared_bytes(self, spec: PackedSpec, tiles: int) -> int:
        bits = spec.kind.bits
        qparams = (4 if bits == 4 else 2) if group_sets(spec) else 0
        chunks = _units(spec) * (32 // bits) * 4
        x = chunks * 18
        return self.warps * self.stages * (2048 + qparams * 128) + x + self.warps * (tiles * 64 + 4)


def takes(spec: PackedSpec, output: Output, device: Gpu) -> bool:
    """Whether `run` takes such a weight: quantised, but not mxfp4, and no larger than `_MOST_BYTES`."""
    sets = group_sets(spec)
    if spec.inputs == 0 or spec.kind.bits == 16 or spec.kind.is_e2m1 or sets & (sets - 1):
        return False
    is_large = spec.shape[0] * spec.shape[1] > _MOST_BYTES
    return not is_large and form_of(spec, output, device) is not None


def run(call: LinearCall) -> None:
    """Multiplies one row of x."""
    spec, output, device, x = call.spec, call.output, call.gpu, call.padded_x()
    form = form_of(spec, output, device)
    assert form is not None
    count, sets = groups(spec)
    sizes = (spec.features, x.shape[1], k_tiles(spec), count, sets.bit_length() - 1, output.epilogue)
    scalars = map(np.int32, (*sizes, is_float(output.out), output.column))
    arguments = (call.weight, qparams_of(call.weight, spec), x, call.bias, output.out, *scalars)
    blocks, tiles = _tiles(spec, output, device)
    shared = form.shared_bytes(spec, tiles)
    launch(_kernel(spec, form, x.dtype), (blocks,), form.warps * 32, arguments, shared, is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        for spec in common_specs(dtype):
            if spec.kind.bits < 16:
                yield from (_kernel(spec, form, dtype) for form in (_FORMS[0], *_SMALL))


_FORMS = (Form(16, 4, 1), Form(16, 3, 1), Form(8, 3, 2))
"""Best first."""
_SMALL = (Form(8, 3, 2), Form(8, 5, 2))
"""Forms for weights that are on their way as a whole while the kernel ahead still runs."""


def form_of(spec: PackedSpec, output: Output, device: Gpu) -> Form | None:
    """Returns the best form that fits into shared memory; None: there is none."""
    _, tiles = _tiles(spec, output, device)
    units, room = tiles * _units(spec), min(_BESIDE_DECODE, device.shared_bytes)
    for form in _SMALL:
        if units <= form.warps * (form.stages - 1) and form.shared_bytes(spec, tiles) <= room:
            return form
    return next((form for form in _FORMS if form.shared_bytes(spec, tiles) <= device.shared_bytes), None)


def _tiles(spec: PackedSpec, output: Output, device: Gpu) -> tuple[int, int]:
    """Returns the number of blocks, and of tiles of 16 features that one of them has at most."""
    blocks = min(device.multiprocessors, output.width(spec))
    most = -(-output.width(spec) // blocks) * (2 if output.is_gated else 1)
    return blocks, -(-most // 16)


def _units(spec: PackedSpec) -> int:
    """Returns the number of pairs of k tiles that a feature's quantised values fill."""
    return -(-k_tiles(spec) // 2)


def _kernel(spec: PackedSpec, form: Form, dtype: torch.dtype) -> Kernel:
    sizes = {"WARPS": form.warps, "STAGES": form.stages, "BLOCKS": form.blocks}
    return kernel("linear/gemm/gemv.cu", "gemv", **gemm_macros(spec, dtype), **sizes)
