"""CacheSpec: what a page of one rank's KV cache is. The scheduler counts pages and never looks inside."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "uint4": 4}
"""By the format of the pages."""
QUANTISED = frozenset({"int8", "uint4"})
SCALE_BYTES = 8
"""A zero and a scale in float32, for each token and head of quantised keys, and of values."""


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
    """"float32", "bfloat16", "float16" (on GPUs), "int8" or "uint4"."""

    @property
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED

    @property
    def row_bytes(self) -> int:
        """Of one token's keys (or values) in one head, without their scale: whole bytes."""
        return (self.head_dim * ITEM_BITS[self.dtype] + 7) // 8

    @property
    def bytes_per_page(self) -> int:
        """Of one page number: keys and values of all layers, and their scales."""
        row = self.row_bytes + (SCALE_BYTES if self.is_quantised else 0)
        return 2 * self.num_layers * self.num_kv_heads * self.page_size * row
