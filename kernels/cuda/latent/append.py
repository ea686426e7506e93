"""What lies between the products with a layer's queries and latents and its attention, on a GPU: see append.cu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, kernel, launch
from allspan.kernels.cuda.rows.arguments import EARLY, TYPES, check
from allspan.kernels.latent_tensors import NewLatents
from allspan.kernels.ops import Rotation

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

MOST_WIDTH = 1024
"""Elements of a row of the cache."""

PAGES = (torch.int8, torch.float8_e4m3fn)
"""What pages hold beside elements of 16 bits, with a zero and a scale for each token."""

_THREADS = 256


def latent_append(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    rotation: Rotation[Tensor],
    cache: Tensor,
    scales: Tensor | None,
    slots: Tensor,
) -> None:
    """See `OpSet.latent_append`; q and kv are of 16 bits, and a slot of -1 writes no page. float8_e4m3fn pages: zero =
    0, scale = max(largest |x| / 448, 1e-12), n = x / scale to the nearest; see `rotary_append` of this backend."""
    n, heads, size = q.shape
    arguments = append_arguments(q, NewLatents(kv, weight, eps, slots), rotation, cache, scales)
    if n == 0:
        return
    own = q, np.int64(q.stride(0)), np.int32(heads), np.int32(size), rotation.q_scales
    launch(_kernel(cache.dtype, element_macro(q.dtype)), (n,), _THREADS, (*own, *arguments), is_early=EARLY)


def append_arguments(
    q: Tensor, new: NewLatents[Tensor], rotation: Rotation[Tensor], cache: Tensor, scales: Tensor | None
) -> tuple[Any, ...]:
    """Returns the arguments of the kernels that are of new latents and their pages, and raises ValueError for what they
    would read or write past."""
    (kv, weight, eps, slots), (positions, cos_sin, q_scales), n = new, rotation, len(q)
    latent, rot = len(weight), cos_sin.shape[1]
    _check_rows(q, kv, (latent, rot))
    check("weight", weight, [torch.float32], (latent,))
    check("positions", positions, [torch.int32], (n,))
    check("slots", slots, [torch.int32], (n,))
    check("cos_sin", cos_sin, [torch.float32], (len(cos_sin), rot))
    if q_scales is not None:
        check("q_scales", q_scales, [torch.float32], (len(cos_sin),))
    check_pages(cache, scales, latent + rot, q.dtype)
    return (
        kv, np.int64(kv.stride(0)), np.int32(latent), np.int32(rot), weight, np.float32(eps), positions, cos_sin, cache,
        scales, np.int64(cache.stride(0)), np.int64(cache.stride(2)), np.int32(cache.shape[2]), slots,
    )  # fmt: skip


def check_pages(cache: Tensor, scales: Tensor | None, width: int, dtype: torch.dtype) -> None:
    """Raises ValueError for pages that are not of rows of so many elements, of this dtype or of `PAGES`."""
    if cache.dtype not in (dtype, *PAGES):
        raise ValueError(f"cache: {cache.dtype} is not {dtype}, int8 or float8_e4m3fn")
    page_size = cache.shape[2]
    if cache.shape[1] != 1 or cache.shape[3] != width or cache.stride(3) != 1:
        raise ValueError(f"cache: {tuple(cache.shape)} is not (pages, 1, page size, {width})")
    if page_size & (page_size - 1):
        raise ValueError(f"cache: page size {page_size} is no power of two")
    if (scales is None) == (cache.dtype in PAGES):
        raise ValueError(f"scales: pages of {cache.dtype} have {'no ' if scales is not None else ''}scales")
    if scales is not None:
        check("scales", scales, [torch.float32], (len(cache), 1, 2, page_size))


def _check_rows(q: Tensor, kv: Tensor, sizes: tuple[int, int]) -> None:
    width, (n, _, size) = sum(sizes), q.shape
    if sizes[1] % 2 or sizes[1] > size or width > MOST_WIDTH:
        raise ValueError(f"cos_sin: {sizes[1]} elements that turn are not an even number up to {size}, or {width} are "
                         f"more than {MOST_WIDTH} a row")  # fmt: skip
    if q.dtype not in HALVES or q.stride(2) != 1 or q.stride(1) != size:
        raise ValueError(f"q: {q.dtype} {tuple(q.shape)} {q.stride()} is not of 16 bits, heads one after the other")
    if kv.dtype is not q.dtype or kv.shape != (n, width) or kv.stride(1) != 1:
        raise ValueError(f"kv: {kv.dtype} {tuple(kv.shape)} is not {q.dtype} ({n}, {width})")


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    """See variants.py."""
    for dtype in (*HALVES, *PAGES):
        yield _kernel(dtype, element_macro(dtype))


def _kernel(pages: torch.dtype, kind: dict[str, int]) -> Kernel:
    return kernel("latent/append.cu", "latent_append", FORMAT=TYPES[pages], **kind)
