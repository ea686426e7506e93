"""KVCache: one rank's pages of keys and values."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from allspan.protos.errors import ConfigError, InternalError
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.scheduler.plan import Copy


class KVCache:
    """`keys[layer]` and `values[layer]` are [num_pages, num_kv_heads, page_size, head_dim], zeros at first.

    On the CPU they lie in one anonymous mapping: pages of memory are taken when first written, on the node of the
    thread that writes. Raises ConfigError when the memory cannot be had.
    """

    def __init__(self, spec: CacheSpec, num_pages: int, device: str = "cpu") -> None:
        self.spec = spec
        self.num_pages = num_pages
        self.num_bytes = spec.bytes_per_page * num_pages
        try:
            raw = (
                _mapped(self.num_bytes)
                if device == "cpu"
                else torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
            )
        except (OSError, ValueError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"kv_cache_bytes: {self.num_bytes} bytes for {num_pages} pages of KV cannot be had on {device}: {error}"
            ) from error
        pages = raw.view(getattr(torch, spec.dtype)).view(2 * spec.num_layers, num_pages, *spec.page_shape)
        layers = pages.unbind(0)
        self.keys: list[Tensor] = list(layers[::2])
        self.values: list[Tensor] = list(layers[1::2])
        self._parts: tuple[Tensor, ...] = (pages,)

    def copy_pages(self, source: KVCache, copies: Iterable[Copy]) -> None:
        """Copies whole pages of `source` (keys and values of all layers) into this cache, one after the other: what
        saves do on a host cache from the device's, and loads the other way round. The caches' devices may differ.

        Raises InternalError for a cache of another spec, or for a page that either cache does not have.
        """
        if source.spec != self.spec:
            raise InternalError(f"pages of {source.spec} copied into a cache of {self.spec}")
        for copy in copies:
            if not (0 <= copy.source < source.num_pages and 0 <= copy.target < self.num_pages):
                raise InternalError(
                    f"page {copy.source} of {source.num_pages} copied to page {copy.target} of {self.num_pages}"
                )
            for ours, theirs in zip(self._parts, source._parts, strict=True):
                ours[:, copy.target].copy_(theirs[:, copy.source])


def _mapped(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # advice: a kernel built without huge pages refuses it
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
