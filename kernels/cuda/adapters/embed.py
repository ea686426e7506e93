"""Rows of the adapters of an embedding, on a GPU: embed.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel, element_macro, kernel, launch
from allspan.kernels.cuda.rows.arguments import EARLY, FLOATS, check

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_THREADS = 256


def embed_adapters(ids: Tensor, adapters: Tensor, weight: Tensor, first_row: int, out: Tensor) -> None:
    """See `AdapterOps.embed_adapters`. Raises ValueError for what the kernel would read or write past."""
    (num_places, count, width), rows = weight.shape, len(out)
    check("ids", ids, [torch.int32], (rows,))
    check("adapters", adapters, [torch.int32], (rows,))
    check("weight", weight, FLOATS, (num_places, count, width))
    check("out", out, [torch.float32], (rows, width))
    if out.numel() == 0:
        return
    sizes = [np.int32(size) for size in (first_row, count, num_places, rows, width)]
    blocks = -(-rows * width // _THREADS)
    launch(_kernel(weight.dtype), (blocks,), _THREADS, (ids, adapters, weight, *sizes, out), is_early=EARLY)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yields the kernels of 16 bits; that of float32 compiles at its first use."""
    yield from map(_kernel, FLOATS[1:])


def _kernel(dtype: torch.dtype) -> Kernel:
    is_wide = int(dtype is torch.float32)
    return kernel("adapters/embed.cu", "embed_adapters", IS_WIDE=is_wide, **element_macro(dtype))
