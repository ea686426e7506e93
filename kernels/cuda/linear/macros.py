"""Macros and sizes that kernels of packed linear ops are compiled and launched with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import element_macro
from allspan.kernels.cuda.linear.call import Output, is_float
from allspan.kernels.packed_spec import PackedSpec

BLOCKS_A_MULTIPROCESSOR = 16
"""Thread blocks of a kernel that goes through a tensor once."""

_COMMON: dict[torch.dtype, dict[str, tuple[int, ...]]] = {
    torch.bfloat16: {
        **dict.fromkeys(("bf16", "fp8", "fp8_block", "channel8", "channel4"), (0,)),
        "group8": (32, 64),
        "group4": (32, 64, 128),
    },
    torch.float16: {"f16": (0,), "channel8": (0,), "group4": (128,)},
}
"""Formats and the sizes of their quantisation groups, by the type of x."""


def common_specs(dtype: torch.dtype) -> Iterator[PackedSpec]:
    """Yields the weights that kernels are compiled for ahead, with x in `dtype`: one of each set of macros."""
    for name, sizes in _COMMON[dtype].items():
        yield from (PackedSpec(name, "", (), 0, group=size, memory="rows") for size in sizes)


def gemm_sizes(x: Tensor, spec: PackedSpec, output: Output) -> Iterator[np.int32]:
    """Yields the sizes that skinny kernels are launched with, for x padded to whole 16 bytes."""
    sizes = (len(x), spec.features, x.shape[1], k_tiles(spec), groups(spec)[1], output.epilogue, is_float(output.out))
    return map(np.int32, (*sizes, x.stride(0), output.out.stride(0), output.column))


def gemm_macros(spec: PackedSpec, dtype: torch.dtype) -> dict[str, int]:
    """Returns the macros of gemv and skinny kernels with x in `dtype`."""
    return bits_macros(spec, dtype) | {"GROUP_SETS": min(group_sets(spec), 16 // spec.kind.bits)}


def dequant_macros(spec: PackedSpec, dtype: torch.dtype) -> dict[str, int]:
    """Returns the macros of kernels that dequantise to `dtype`."""
    return bits_macros(spec, dtype) | {"GROUPED": int(group_sets(spec) > 0)}


def bits_macros(spec: PackedSpec, dtype: torch.dtype) -> dict[str, int]:
    """Returns the macros of decode.cuh, for activations in `dtype`."""
    return {"BITS": spec.kind.bits, "FLOATS": int(spec.kind.is_float), **element_macro(dtype)}


def groups_of_k_tile(spec: PackedSpec) -> int:
    """Returns the number of qparams of a feature that a k tile needs; 0 where scales are a channel's."""
    sets = 16 // spec.kind.bits
    return sets // min(group_sets(spec), sets) if group_sets(spec) else 0


def group_sets(spec: PackedSpec) -> int:
    """Returns the number of sets of 32 inputs that share qparams, 0 where all do; of e2m1 those of a k tile do, which
    have a byte each."""
    return 4 if spec.kind.is_e2m1 else spec.block // 32 if spec.kind.scale_bytes else 0


def groups(spec: PackedSpec) -> tuple[int, int]:
    """Returns the number of qparams of a feature and of sets of 32 inputs that share them."""
    return spec.qparams, max(1, group_sets(spec))


def k_tiles(spec: PackedSpec) -> int:
    """Returns the number of k tiles, of 64 bytes, that a feature's quantised values fill."""
    return spec.depth * spec.kind.bits // 512
