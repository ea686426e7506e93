"""Products of one row of x with weights in rows: gemv.cu, in which shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Gpu, Kernel, gpu, kernel, launch
from allspan.kernels.cuda.linear.products import (
    GATED,
    Into,
    common_specs,
    group_sets,
    groups,
    is_float,
    macros_of,
    slabs,
)
from allspan.kernels.packed import PackedSpec
from allspan.kernels.rows import numbers_of

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_MOST_BYTES = 256 << 20
_BESIDE_DECODE = 110 << 10
"""Bytes of shared memory that a block may have beside one of paged_decode, behind which it waits with its weight."""


@dataclass(frozen=True, slots=True)
class Form:
    """Of blocks of `gemv`: its macros."""

    warps: int
    stages: int
    blocks: int

    def shared_bytes(self, spec: PackedSpec, tiles: int) -> int:
        bits = spec.kind.bits
        numbers = (4 if bits == 4 else 2) if group_sets(spec) else 0
        chunks = _units(spec) * (32 // bits) * 4
        x = chunks * 18
        return self.warps * self.stages * (2048 + numbers * 128) + x + self.warps * (tiles * 64 + 4)


def takes(spec: PackedSpec, into: Into, device: Gpu) -> bool:
    """Whether `one_row` is for such a weight: of codes, and not so large that its first and last microseconds are
    nothing beside it. These `skinny` reads in longer pieces, by a few percent faster."""
    sets = group_sets(spec)
    if spec.inputs == 0 or spec.kind.bits == 16 or sets & (sets - 1):
        return False
    is_large = spec.shape[0] * spec.shape[1] > _MOST_BYTES
    return not is_large and form_of(spec, into, device) is not None


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    """x [1, K] with the lead before it, in rows of whole 16 bytes."""
    device = gpu(x.device)
    form = form_of(spec, into, device)
    assert form is not None
    count, sets = groups(spec)
    sizes = (spec.features, x.shape[1], slabs(spec), count, sets.bit_length() - 1, into.epilogue, is_float(into.out))
    numbers = (*map(np.int32, sizes), np.int32(into.column))
    arguments = (weight, numbers_of(weight, spec), x, bias, into.out, *numbers)
    blocks, tiles = _tiles(spec, into, device)
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
"""Of weights that are on their way as a whole while the kernel ahead still runs."""


def form_of(spec: PackedSpec, into: Into, device: Gpu) -> Form | None:
    _, tiles = _tiles(spec, into, device)
    units, room = tiles * _units(spec), min(_BESIDE_DECODE, device.shared_bytes)
    for form in _SMALL:
        if units <= form.warps * (form.stages - 1) and form.shared_bytes(spec, tiles) <= room:
            return form
    return next((form for form in _FORMS if form.shared_bytes(spec, tiles) <= device.shared_bytes), None)


def _tiles(spec: PackedSpec, into: Into, device: Gpu) -> tuple[int, int]:
    """Blocks, and tiles of 16 features that one of them has at most."""
    blocks = min(device.multiprocessors, into.width(spec))
    most = -(-into.width(spec) // blocks) * (2 if into.epilogue == GATED else 1)
    return blocks, -(-most // 16)


def _units(spec: PackedSpec) -> int:
    """Of two slabs, that a feature's codes are."""
    return -(-slabs(spec) // 2)


def _kernel(spec: PackedSpec, form: Form, dtype: torch.dtype) -> Kernel:
    sizes = {"WARPS": form.warps, "STAGES": form.stages, "BLOCKS": form.blocks}
    return kernel("linear/gemv.cu", "gemv", **macros_of(spec, dtype), **sizes)
