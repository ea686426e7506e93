"""The sum of what several blocks of `skinny_shared` have of a tile, and its epilogue: see skinny_reduce.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, kernel, launch
from allspan.kernels.cuda.linear.call import LinearCall, is_float

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""


def run(partial: Tensor, call: LinearCall, line: Sequence[np.int32], blocks: tuple[int, ...], threads: int) -> None:
    """Adds up `partial`, float32; `line`: tiles of rows, tiles, steps, shared tiles and blocks of `skinny_shared`."""
    output, out = call.output, call.output.out
    sizes = (call.rows, output.width(call.spec), output.epilogue, is_float(out), out.stride(0), output.column)
    launch(
        _kernel(call.x.dtype), blocks, threads, (partial, call.bias, out, *map(np.int32, sizes), *line), is_early=True
    )


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    yield from map(_kernel, HALVES)


def _kernel(dtype: torch.dtype) -> Kernel:
    return kernel("linear/gemm/skinny_reduce.cu", "skinny_reduce", **element_macro(dtype))
