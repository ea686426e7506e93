"""Attention over paged latents on Hopper, for queries of few heads: see attend_few_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from allspan.kernels.cuda.jit.modules import (
    HALVES,
    Kernel,
    element_macro,
    gpu,
    kernel,
    launch,
    shared_limit,
    tensor_map,
)
from allspan.kernels.cuda.latent.attend.attend_sm90 import CAPABILITY, TOKENS

ROWS = (16, 32, 48)
"""Rows of a tile."""

_THREADS = 512
_CHUNKS, _CHUNK = 9, 64 * 128


def tile_rows_of(rows: int) -> int:
    """Returns the rows of a tile of requests of so many; 0: they are too many."""
    return next((most for most in ROWS if most >= rows), 0)


def launch_few_sm90(
    q: tuple[Tensor, Tensor],
    cache: Tensor,
    lines: list[Any],
    into: list[Any],
    scale: float,
    rows: int,
    requests: int,
) -> None:
    """See `launch_sm90`; rows: of a tile; requests: those of `lines`."""
    latents, turned = q
    arguments = [
        tensor_map(cache[:, 0], min(TOKENS, cache.shape[2])), latents, np.int64(latents.stride(0)), turned,
        np.int64(turned.stride(0)), np.int32(turned.stride(1)), *lines, np.int32(cache.shape[2].bit_length() - 1),
        np.float32(scale), *into,
    ]  # fmt: skip
    blocks = gpu(latents.device).multiprocessors
    if into[-1]:
        blocks = _fewer(blocks, requests)
    launch(_kernel(rows, element_macro(latents.dtype)), (blocks,), _THREADS, arguments, _shared(rows), True)


def _fewer(blocks: int, requests: int) -> int:
    """A few blocks less, where requests of one length are then cut alike, or not at all."""
    alike = (n for n in range(blocks, blocks * 19 // 20, -1) if n % requests == 0 or requests % n == 0)
    return next(alike, blocks)


def _shared(rows: int, slots: int | None = None) -> int:
    """Returns bytes, with as many chunks of tokens as there is room for unless `slots` says how many."""
    queries = (1 if rows == ROWS[-1] else 2) * _CHUNKS
    fixed = 1024 + (queries + 2) * rows * 128 + rows * (8 + 2 + 4) * 4 + 480
    return fixed + (_slots_of(rows) if slots is None else slots) * (_CHUNK + 16)


def _slots_of(rows: int) -> int:
    return (shared_limit(CAPABILITY) - _shared(rows, 0)) // (_CHUNK + 16)


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    if capability != CAPABILITY:
        return []
    return [_kernel(rows, element_macro(dtype)) for dtype in HALVES for rows in ROWS]


def _kernel(rows: int, kind: dict[str, int]) -> Kernel:
    return kernel("latent/attend/attend_few_sm90.cu", "attend_few_sm90", ROWS=rows, SLOTS=_slots_of(rows), **kind)
