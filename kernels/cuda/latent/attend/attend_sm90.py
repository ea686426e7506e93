"""Attention over paged latents on Hopper, where queries fill tiles of its tensor cores: see attend_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch, tensor_map

CAPABILITY = (9, 0)
SIZES = (512, 64)
"""Elements of a latent and of what turns, of all released models."""
LEAST_PAGE, TOKENS, ROWS = 16, 64, 64
"""Tokens of a page, at least; of a unit of work; rows of a tile."""

_THREADS = 384
_MANY = 8  # tiles, one more of which does not matter
_CHUNK = 64 * 128
_SHARED = 1024 + (3 * 9 + 1) * _CHUNK + 6 * ROWS * 4 + 384


def beside(rows: int) -> int:
    """Returns how many blocks share a stretch, whose tiles read the same tokens, where a request has so many rows."""
    tiles = -(-rows // ROWS)
    return 2 if tiles % 2 == 0 or tiles > _MANY else 1


def why_not(turned: Tensor, cache: Tensor, latent: int) -> str:
    """What of these the kernel is not made for; "" for nothing."""
    if gpu(cache.device).capability != CAPABILITY:
        return "made for compute capability 9.0"
    if cache.dtype not in HALVES:
        return f"cache: {cache.dtype} is not bfloat16 or float16"
    if (latent, turned.shape[2]) != SIZES:
        return f"cache: latents of {latent} and {turned.shape[2]} that turn are not of {SIZES}"
    if cache.shape[2] < LEAST_PAGE:
        return f"cache: pages of {cache.shape[2]} tokens are below {LEAST_PAGE}"
    if any(number % 8 for number in (turned.storage_offset(), *turned.stride()[:2])):
        return f"turned: strides {turned.stride()} are no multiples of 16 bytes"
    return ""


def launch_sm90(
    q: tuple[Tensor, Tensor], cache: Tensor, lines: list[Any], into: list[Any], scale: float, together: int
) -> None:
    """lines: how queries are cut, from `cut_tiles` to `indices`; into: from `out` to `merges`; scale: of scores, to
    base 2; together: `beside`."""
    latents, turned = q
    blocks = gpu(latents.device).multiprocessors // together * together
    pages = tensor_map(cache[:, 0], min(TOKENS, cache.shape[2]))
    arguments = [
        pages, latents, np.int64(latents.stride(0)), turned, np.int64(turned.stride(0)), np.int32(turned.stride(1)),
        *lines, np.int32(cache.shape[2].bit_length() - 1), np.float32(scale), *into, np.int32(together),
    ]  # fmt: skip
    launch(_kernel(element_macro(latents.dtype)), (blocks,), _THREADS, arguments, _SHARED, True)


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    if capability != CAPABILITY:
        return []
    return [_kernel(element_macro(dtype)) for dtype in HALVES]


def _kernel(kind: dict[str, int]) -> Kernel:
    return kernel("latent/attend/attend_sm90.cu", "attend_sm90", **kind)
