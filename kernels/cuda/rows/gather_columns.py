"""Columns gathered on a GPU: for weights whose inputs lie in another order than they come."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, kernel, launch
from allspan.kernels.cuda.rows.arguments import check

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_GATHER = kernel("rows/gather_columns.cu", "gather_columns")


def gather_columns(x: Tensor, columns: Tensor, out: Tensor) -> None:
    """See `OpSet.gather_columns`; x and out are both of 16 bits. Raises ValueError for what does not fit."""
    check("x", x, HALVES, (len(out), x.shape[1]))
    check("columns", columns, [torch.int32], (out.shape[1],))
    check("out", out, [x.dtype], (len(x), len(columns)))
    if out.numel() == 0:
        return
    threads = min(256, -(-out.shape[1] // 256) * 32)
    pieces = -(-out.shape[1] // (8 * threads))
    sizes = map(np.int32, (x.shape[1], out.shape[1], pieces))
    launch(_GATHER, (len(x) * pieces,), threads, (x, columns, out, *sizes), is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    yield _GATHER
