"""Packed weights as plain matrices, for the matrix products of many rows: see dequantise.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, gpu, kernel, launch
from allspan.kernels.cuda.linear.call import LinearCall
from allspan.kernels.cuda.linear.macros import BLOCKS_A_MULTIPROCESSOR, common_specs, dequant_macros, groups, k_tiles
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import codes_of, qparams_of

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""


def matrix_of(call: LinearCall) -> Tensor:
    """Returns the weight [features, inputs] in x's type: a view, or of quantised weights a new tensor for this call."""
    spec = call.spec
    matrix = codes_of(call.weight, spec) if spec.kind.bits == 16 else dequantised(call.weight, spec, call.x.dtype)
    return matrix[:, spec.k_offset : spec.k_offset + spec.inputs]


def dequantised(weight: Tensor, spec: PackedSpec, dtype: torch.dtype) -> Tensor:
    """Returns a new matrix [features, depth] in `dtype`, or of a weight with places before its own dimensions [places,
    features, depth]."""
    *places, _, _ = weight.shape
    out = torch.empty(*places, spec.features, spec.depth, dtype=dtype, device=weight.device)
    sizes = map(np.int32, (spec.features, *groups(spec), k_tiles(spec)))
    chunks, each = spec.features * k_tiles(spec) * 4, math.prod(places)
    most = -(-BLOCKS_A_MULTIPROCESSOR * gpu(weight.device).multiprocessors // each)
    blocks = max(1, min(-(-chunks // 256), most)), each
    qparams = qparams_of(weight[0] if places else weight, spec)
    place_bytes = np.int64(spec.shape[0] * spec.shape[1])
    launch(_kernel(spec, dtype), blocks, 256, (weight, qparams, out, place_bytes, *sizes))
    return out


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        yield from (_kernel(spec, dtype) for spec in common_specs(dtype))


def _kernel(spec: PackedSpec, dtype: torch.dtype) -> Kernel:
    return kernel("linear/dequantise.cu", "dequantise", **dequant_macros(spec, dtype))
