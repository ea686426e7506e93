"""SwiGLU of many rows in 8 bits, on a GPU: silu_rows.cu, for `silu_mul_quantised` of allspan.kernels.library."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.rows.arguments import EARLY, TYPES, strides_of

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_THREADS = 512
_STAGED_BLOCKS, _MOST_STAGED_UNITS = 2, 5
"""Thread blocks of a multiprocessor, and units of a thread that its registers have room for."""


def silu_rows(source: Tensor, out: Tensor, scales: Tensor | None, threads: int, each: int) -> bool:
    """Launches the kernel, with `each` units a thread, where it is for so many rows; returns whether it did."""
    n, width = out.shape
    blocks, staged_bytes = _staged(n, threads, each, out.device)
    if each > _MOST_STAGED_UNITS or not blocks:
        return False
    given = (source, out, scales, strides_of(scales)[0], np.int32(n), np.int32(width))
    launch(_silu_kernel(source.dtype, out.dtype, each), (blocks,), threads, given, staged_bytes, is_early=EARLY)
    return True


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yields the kernels of long rows from bfloat16 to fp8, and of float16."""
    yield from (_silu_kernel(torch.bfloat16, torch.float8_e4m3fn, each) for each in (3, 4, 5))
    yield _silu_kernel(torch.float16, torch.float8_e4m3fn, 1)  # sm_75 has no room for more


def _staged(n: int, threads: int, each: int, device: torch.device) -> tuple[int, int]:
    """Thread blocks and the shared memory of one; no blocks where each would have a row at most, or a
    multiprocessor has no room for them."""
    here, num_bytes = gpu(device), threads * each * 32
    blocks, own = _STAGED_BLOCKS * here.multiprocessors, 2048  # own: bytes that a block has beside its rows
    fits = _STAGED_BLOCKS * (num_bytes + own) <= here.shared_bytes
    return blocks if fits and n > blocks else 0, num_bytes


def _silu_kernel(source: torch.dtype, out: torch.dtype, units: int) -> Kernel:
    return kernel(
        "rows/silu_rows.cu", "silu_rows", SOURCE=TYPES[source], OUT=TYPES[out], UNITS=units, THREADS=_THREADS, WHOLE=1,
        **element_macro(source),
    )  # fmt: skip
