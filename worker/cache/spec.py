"""CacheSpec: what a page of one rank's KV cache is. The scheduler counts pages and never looks inside."""

from __future__ import annotations

import math
from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Pages of [kv_head, token, head_dim], one of keys and one of values in every layer."""

    page_size: int
    """Tokens."""
    num_layers: int
    num_kv_heads: int
    """Of this rank."""
    head_dim: int
    dtype: str
    """"float32" or "bfloat16"."""

    @property
    def page_shape(self) -> tuple[int, int, int]:
        return self.num_kv_heads, self.page_size, self.head_dim

    @property
    def bytes_per_page(self) -> int:
        """Of one page number: keys and values of all layers."""
        return 2 * self.num_layers * math.prod(self.page_shape) * ITEM_BYTES[self.dtype]
