"""How many KV pages a rank gets: asked once, before the cache is made, and refused early with numbers."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.protos.config import CacheConfig
from allspan.protos.errors import ConfigError

DEFAULT_SHARE = 0.25
"""Of the node's available memory, for the KV of all ranks on it."""
MOST_SLOTS = 2**31
"""Tokens of the whole cache: their places are int32."""


@dataclass(frozen=True, slots=True)
class CacheDemand:
    """What one rank's cache has to hold. `available_bytes` (0: unknown) is the node's, shared by `ranks_on_node`."""

    bytes_per_page: int
    max_model_len: int
    max_num_seqs: int
    available_bytes: int
    ranks_on_node: int = 1


def pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_size)


def num_kv_pages(cache: CacheConfig, demand: CacheDemand) -> int:
    """Pages of this rank's cache: `kv_cache_bytes` of them if given, else min(25 % of the node's available memory /
    ranks on it, max_num_seqs full contexts). Raises ConfigError when one full context does not fit, with the largest
    max_model_len that does, and when the node has less memory than is asked for. All ranks of a world take the smallest
    of their answers."""
    context = pages_of(demand.max_model_len, cache.page_size)
    if cache.kv_cache_bytes:
        budget = cache.kv_cache_bytes
        pages = budget // demand.bytes_per_page
        source = f"kv_cache_bytes is {budget}"
    else:
        budget = int(demand.available_bytes * DEFAULT_SHARE) // demand.ranks_on_node
        pages = min(budget // demand.bytes_per_page, demand.max_num_seqs * context)
        source = (
            f"the budget is {_size(budget)} ({DEFAULT_SHARE:.0%} of {_size(demand.available_bytes)} available memory"
            f" / {demand.ranks_on_node} rank(s) on the node)"
        )
    pages = min(pages, MOST_SLOTS // cache.page_size)
    if pages < context:
        needed = context * demand.bytes_per_page
        way_out = f"set max_model_len to at most {pages * cache.page_size}, or " if pages else "set "
        raise ConfigError(
            f"the KV cache of one context of {demand.max_model_len} tokens takes {_size(needed)} on this rank, but "
            f"{source}: {way_out}kv_cache_bytes to at least {needed}"
        )
    wanted = pages * demand.bytes_per_page * demand.ranks_on_node
    if 0 < demand.available_bytes < wanted:
        most = demand.available_bytes // demand.ranks_on_node
        raise ConfigError(
            f"kv_cache_bytes is {cache.kv_cache_bytes}, {_size(wanted)} for {demand.ranks_on_node} rank(s) on the node,"
            f" which has {_size(demand.available_bytes)} available: set it to at most {most}"
        )
    return pages


def check_weights_fit(weight_bytes: int, available: int, ranks_on_node: int) -> None:
    """ConfigError when the weights of a node's ranks, of `weight_bytes` each, are more than its memory (0: unknown)."""
    needed = weight_bytes * ranks_on_node
    if 0 < available < needed:
        raise ConfigError(
            f"the weights of {ranks_on_node} rank(s) on this node take {_size(needed)} of memory, {_size(available)} "
            "are available: end other programs, raise the container's limit, or take a smaller model"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
