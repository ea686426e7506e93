"""RMSNorm of all heads of queries, and of keys, together, on a GPU: all_heads.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.rows.arguments import check

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_THREADS, _BLOCKS_A_MULTIPROCESSOR = 256, 4


def mean_squares(x: Tensor, shares: Tensor, out: Tensor) -> None:
    """See `OpSet.mean_squares`; x of 16 bits. Raises ValueError for what does not fit."""
    n, heads, size = x.shape
    check("x", x, HALVES, (n, heads, size))
    check("shares", shares, [torch.float32], (2, heads))
    check("out", out, [torch.float32], (n, 2))
    if n:
        arguments = (x, shares, out, np.int32(heads), np.int32(size))
        launch(_kernel("mean_squares", x.dtype), (n,), _THREADS, arguments, is_early=True)


def norm_heads(x: Tensor, means: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """See `OpSet.norm_heads`; x of 16 bits. Raises ValueError for what does not fit."""
    n, heads, size = x.shape
    check("x", x, HALVES, (n, heads, size))
    check("means", means, [torch.float32], (n, 2))
    check("q_weight", q_weight, [torch.float32], (len(q_weight),))
    check("k_weight", k_weight, [torch.float32], (len(k_weight),))
    normed = len(q_weight) + len(k_weight)
    if normed > heads * size:
        raise ValueError(f"x: {heads} heads of {size} are fewer than the {normed} weights")
    if not n or not normed:
        return
    sizes = (np.int64(n), *map(np.int32, (heads * size, len(q_weight), len(k_weight))))
    blocks = min(-(-n * normed // _THREADS), _BLOCKS_A_MULTIPROCESSOR * gpu(x.device).multiprocessors)
    arguments = (x, means, q_weight, k_weight, np.float32(eps), *sizes)
    launch(_kernel("norm_heads", x.dtype), (blocks,), _THREADS, arguments, is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        yield from (_kernel(name, dtype) for name in ("mean_squares", "norm_heads"))


def _kernel(name: str, dtype: torch.dtype) -> Kernel:
    return kernel("rows/all_heads.cu", name, **element_macro(dtype))
