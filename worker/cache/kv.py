"""KVCache: one rank's pages of keys and values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from allspan.protos.api.errors import ConfigError, InternalError
from allspan.worker.cache.page_pool import Copy
from allspan.worker.cache.spec import SCALE_BYTES, CacheSpec
from allspan.worker.process.release_memory import anonymous

_ELEMENTS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "uint4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}
"""What the kernels take for a page's format."""


class KVCache:
    """`keys[layer]` and `values[layer]` are [num_pages, num_kv_heads, page_size, elements], zeros at first: float32,
    bfloat16, float16, int8 or float8_e4m3fn [.., head_dim], or uint8 [.., ⌈head_dim / 2⌉] for uint4.
    `key_scales[layer]` and `value_scales[layer]` are float32 [num_pages, num_kv_heads, 2, page_size], or None for plain
    floats; see `allspan.kernels.ops.OpSet.append_kv`. Of latents there is one tensor a layer: `values` are the `keys`.

    On the CPU all of it lies in one anonymous mapping: pages of memory are taken when first written, on the node of the
    thread that writes. Raises ConfigError when the memory cannot be had.
    """

    def __init__(self, spec: CacheSpec, num_pages: int, device: str = "") -> None:
        """`device`: the torch device that holds it; "": host memory."""
        self.spec = spec
        self.num_pages = num_pages
        self.num_bytes = spec.bytes_per_page * num_pages
        raw = _memory(self.num_bytes, num_pages, device)
        layers, heads, size = spec.num_parts, spec.num_kv_heads, spec.page_size
        self.key_scales: list[Tensor | None] = [None] * spec.num_layers
        self.value_scales: list[Tensor | None] = [None] * spec.num_layers
        self.parts: list[Tensor] = []
        """All layers' pages, and all layers' scales: [layers, num_pages, ...], keys and values in turn."""
        step = 1 if spec.is_latent else 2
        if spec.is_quantised:
            count = SCALE_BYTES * layers * num_pages * heads * size
            scales = raw[:count].view(torch.float32).view(layers, num_pages, heads, 2, size)
            self.parts.append(scales)
            self.key_scales, self.value_scales = (
                list(scales[::step].unbind(0)),
                list(scales[step - 1 :: step].unbind(0)),
            )
            raw = raw[count:]
        pages = raw.view(_ELEMENTS[spec.dtype]).view(layers, num_pages, heads, size, -1)
        self.parts.append(pages)
        self.keys: list[Tensor] = list(pages[::step].unbind(0))
        self.values: list[Tensor] = list(pages[step - 1 :: step].unbind(0))

    def copy_pages(self, source: KVCache, copies: Iterable[Copy]) -> None:
        """Copies whole pages of `source` (all layers' keys, values and scales) into this cache, one after the other:
        what saves do on a host cache from the device's, and loads the other way round. The devices may differ.

        Raises InternalError for a cache of another spec, or for a page that either cache does not have.
        """
        if source.spec != self.spec:
            raise InternalError(f"pages of {source.spec} copied into a cache of {self.spec}")
        for copy in copies:
            if not (0 <= copy.source < source.num_pages and 0 <= copy.target < self.num_pages):
                raise InternalError(
                    f"page {copy.source} of {source.num_pages} copied to page {copy.target} of {self.num_pages}"
                )
            for ours, theirs in zip(self.parts, source.parts, strict=True):
                ours[:, copy.target].copy_(theirs[:, copy.source])


def _memory(num_bytes: int, num_pages: int, device: str) -> Tensor:
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device) if device else anonymous(num_bytes)
    except (OSError, ValueError, torch.OutOfMemoryError) as error:
        where = f" on {device}" if device else ""
        raise ConfigError(
            f"kv_cache_bytes: {num_bytes} bytes for {num_pages} pages of KV cannot be had{where}: {error}"
        ) from error
