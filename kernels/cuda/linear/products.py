"""What the kernels of products with weights in rows (`allspan.kernels.rows`) are told of a weight, and of where a
product goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import element_macro
from allspan.kernels.packed import PackedSpec

STORE, ADD, GATED = 0, 1, 2
"""What becomes of a product."""


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


_COMMON: dict[torch.dtype, dict[str, tuple[int, ...]]] = {
    torch.bfloat16: {
        **dict.fromkeys(("bf16", "fp8", "fp8_block", "channel8", "channel4"), (0,)),
        "group8": (32, 64),
        "group4": (32, 64, 128),
    },
    torch.float16: {"f16": (0,), "channel8": (0,), "group4": (128,)},
}
"""By the type of x, formats and inputs that share a scale."""


def common_specs(dtype: torch.dtype) -> Iterator[PackedSpec]:
    """Of those that products with x in `dtype` are compiled for ahead: one of each set of macros."""
    for name, sizes in _COMMON[dtype].items():
        yield from (PackedSpec(name, "", (), 0, group=size, memory="rows") for size in sizes)


def sizes_of(x: Tensor, spec: PackedSpec, into: Into) -> Iterator[np.int32]:
    sizes = (len(x), spec.features, x.shape[1], slabs(spec), groups(spec)[1], into.epilogue, is_float(into.out))
    return map(np.int32, (*sizes, x.stride(0), into.out.stride(0), into.column))


def macros_of(spec: PackedSpec, dtype: torch.dtype) -> dict[str, int]:
    """Of products with x in `dtype`."""
    return bits_of(spec, dtype) | {"GROUP_SETS": min(group_sets(spec), 16 // spec.kind.bits)}


def numbers_of_slab(spec: PackedSpec) -> int:
    """Groups that a slab has a part of, if numbers are a group's."""
    sets = 16 // spec.kind.bits
    return sets // min(group_sets(spec), sets) if group_sets(spec) else 0


def bits_of(spec: PackedSpec, dtype: torch.dtype) -> dict[str, int]:
    """Macros of codes.cuh, of what meets activations in `dtype`."""
    return {"BITS": spec.kind.bits, "FLOATS": int(spec.kind.is_e4m3), **element_macro(dtype)}


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
