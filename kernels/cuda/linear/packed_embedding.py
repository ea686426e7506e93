"""Rows of a packed embedding, dequantised: see packed_embedding.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, kernel, launch
from allspan.kernels.cuda.linear.call import check_weight, is_float
from allspan.kernels.cuda.linear.macros import common_specs, dequant_macros, groups, k_tiles
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import FLOATS, qparams_of

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""


def packed_embedding(ids: Tensor, weight: Tensor, spec: PackedSpec, first_row: int, out: Tensor) -> None:
    """See `OpSet.packed_embedding`; out is float32 or of 16 bits."""
    check_weight(weight, spec)
    if ids.dtype != torch.int32 or out.shape != (len(ids), spec.inputs) or not out.is_contiguous():
        raise ValueError(f"out: {list(out.shape)} is not {spec.inputs} of each of {len(ids)} ids ({ids.dtype})")
    dtypes = torch.float32, *([FLOATS[spec.format]] if spec.format in FLOATS else HALVES)
    if out.dtype not in dtypes:
        raise ValueError(f"out: {out.dtype} is none of {', '.join(map(str, dtypes))}, which {spec.format} rows become")
    if len(ids) == 0 or spec.inputs == 0:
        return
    sizes = (*groups(spec), spec.inputs, k_tiles(spec), spec.k_offset, first_row, is_float(out))
    arguments = (ids, weight, qparams_of(weight, spec), out, np.int32(spec.features), *map(np.int32, sizes))
    launch(_kernel(spec, FLOATS.get(spec.format, out.dtype)), (len(ids),), 128, arguments)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        yield from (_kernel(spec, dtype) for spec in common_specs(dtype))


def _kernel(spec: PackedSpec, dtype: torch.dtype) -> Kernel:
    return kernel("linear/packed_embedding.cu", "packed_embedding", **dequant_macros(spec, dtype))
