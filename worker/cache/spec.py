"""Cache groups of one rank: what a page holds and how long a request keeps it. The scheduler counts pages and never
looks inside."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "uint4": 4, "fp8": 8}
"""Format of the pages → bits of an element."""
QUANTISED = frozenset({"int8", "uint4", "fp8"})
SCALE_BYTES = 8
"""A zero (0 in fp8) and a scale in float32, for each token and head of quantised keys, and of values."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Pages of [kv_head, token, head_dim], one of keys and one of values in every layer, or one alone of latents."""

    page_size: int
    """Tokens."""
    num_layers: int
    num_kv_heads: int
    """The KV heads of this rank."""
    head_dim: int
    dtype: str
    """"float32", "bfloat16", "float16" (on GPUs), "int8", "uint4" or, of latents alone, "fp8" (e4m3)."""
    is_latent: bool = False
    """A token has one row, of which both its keys and its values are made."""

    @property
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED

    @property
    def row_bytes(self) -> int:
        """The whole bytes of one token's keys (or values) in one head, without their scale."""
        return (self.head_dim * ITEM_BITS[self.dtype] + 7) // 8

    @property
    def bytes_per_page(self) -> int:
        """The bytes of one page number: the rows of all layers, and their scales."""
        row = self.row_bytes + (SCALE_BYTES if self.is_quantised else 0)
        return self.num_parts * self.num_kv_heads * self.page_size * row

    @property
    def num_parts(self) -> int:
        """The pages of one page number: keys and values of every layer, or its latents."""
        return (1 if self.is_latent else 2) * self.num_layers


@dataclass(frozen=True, slots=True)
class PageLifetime:
    """How long a request holds the pages of a cache group: by default as long as it runs."""

    window: int = 0
    """Tokens that a query sees, itself included; pages wholly behind them are given back. 0: all tokens."""
    is_state: bool = False
    """The request holds one page, which its tokens overwrite."""

    @property
    def keeps_all(self) -> bool:
        """Whether a request keeps the pages of all its tokens."""
        return not (self.window or self.is_state)

    def first_seen(self, position: int) -> int:
        """The first token that the query at `position` sees."""
        return max(0, position + 1 - self.window) if self.window else 0

    def most_pages(self, num_tokens: int, page_size: int, step_tokens: int) -> int:
        """The most pages that a request of `num_tokens` tokens holds at once, in steps of up to `step_tokens`."""
        if self.is_state:
            return 1
        pages = -(-num_tokens // page_size)
        return min(pages, -(-(self.window - 1 + step_tokens) // page_size) + 1) if self.window else pages

    def shortest_step(self, page_size: int, step_tokens: int) -> int:
        """The tokens of a request in a step of `step_tokens` where memory is short: a window's pages hold them beside
        what the first of them sees, so that long steps would take more than the window itself."""
        return min(step_tokens, max(page_size, self.window // 8)) if self.window else step_tokens


ALL_TOKENS = PageLifetime()


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a kind of page and its lifetime. A page number means the same page in all of them."""

    spec: CacheSpec
    """Its `num_layers` is the number of `layers`. Groups of one model have pages of equally many tokens."""
    layers: tuple[int, ...]
    """Numbers in the model; every layer with a cache is in exactly one group."""
    lifetime: PageLifetime = ALL_TOKENS
