"""What launches move_pages.cu: many pages of a KV cache at once, to and from a buffer in which they lie together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel, kernel, launch

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

MOST_PAGES = 256
"""Most pages of a call: their numbers are an argument of the kernel."""
_THREADS, _UNITS = 256, 4
_BYTES = 16


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    return [_kernel(scatters) for scatters in (False, True)]


def gather_pages(cache: Tensor, pages: Sequence[int], buffer: Tensor, first: int = 0) -> None:
    """buffer[i, first:][:size] = the bytes of page `pages[i]`, layer after layer; `size` of all layers.

    cache [layers, pages, …], contiguous; a page of a layer is a multiple of 16 bytes. buffer: uint8 [n, bytes], n and
    `pages` at most MOST_PAGES, contiguous, aligned to 16 bytes, as is `first`. Raises ValueError for what does not fit.
    """
    _move(False, cache, pages, buffer, first)


def scatter_pages(cache: Tensor, pages: Sequence[int], buffer: Tensor, first: int = 0) -> None:
    """The other way round. Each page at most once."""
    _move(True, cache, pages, buffer, first)


def _kernel(scatters: bool) -> Kernel:
    return kernel("cache/move_pages.cu", "move_pages", SCATTER=int(scatters), PAGES=MOST_PAGES, THREADS=_THREADS)


def _move(scatters: bool, cache: Tensor, pages: Sequence[int], buffer: Tensor, first: int) -> None:
    layers, count = cache.shape[:2]
    row, page = cache[0, 0].nbytes, buffer.shape[1]
    if len(pages) > min(MOST_PAGES, len(buffer)) or first + layers * row > page:
        raise ValueError(f"buffer: {tuple(buffer.shape)} has no room for {len(pages)} pages of {layers} · {row} bytes")
    if not cache.is_contiguous() or not buffer.is_contiguous():
        raise ValueError("cache and buffer must be contiguous")
    if row % _BYTES or page % _BYTES or first % _BYTES or cache.data_ptr() % _BYTES or buffer.data_ptr() % _BYTES:
        raise ValueError(f"cache, buffer: pages of {row} and {page} bytes, first {first}: not in steps of {_BYTES}")
    if pages and not 0 <= min(pages) <= max(pages) < count:
        raise ValueError(f"pages: {min(pages)} … {max(pages)} of {count}")
    if not pages:
        return
    places = np.zeros(MOST_PAGES, dtype=np.int32)
    places[: len(pages)] = pages
    sizes = (np.int64(count * row // _BYTES), np.int64(row // _BYTES))
    blocks = -(-row // (_BYTES * _UNITS * _THREADS)), layers, len(pages)
    into = buffer.view(-1)[first:]
    launch(_kernel(scatters), blocks, _THREADS, (cache, *sizes, into, np.int64(page // _BYTES), places.tobytes()))
