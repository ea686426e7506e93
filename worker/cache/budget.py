"""How many KV pages a rank gets: asked once, before the cache is made, and refused early with numbers."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import CacheConfig

DEFAULT_SHARE = 0.25
"""Of the node's available memory, for the KV of all ranks on it."""
GPU_RESERVE = 3 << 29
"""Of a GPU's memory, for what comes after the KV: captured graphs, workspaces, kernels that are loaded."""
MOST_PAGES = 2**20
"""That are taken unasked: a tiny model's would be so many that counting them takes seconds."""
MOST_SLOTS = 2**31
"""Tokens of the whole cache: their places are int32."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that can still be taken. `total`: of the GPU, all that it has; 0 for host memory."""

    available: int
    total: int = 0

    @property
    def place(self) -> str:
        """Where that is, in words."""
        return "GPU" if self.total else "node"


@dataclass(frozen=True, slots=True)
class CacheDemand:
    """What one rank's cache has to hold, and what is left (`available`; 0 bytes: unknown) where `ranks` share it."""

    bytes_per_page: int
    max_model_len: int
    max_num_seqs: int
    room: Room
    ranks: int = 1
    step_bytes: int = 0
    """Of a GPU's memory, that this rank takes for the time of a step."""


def pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_size)


def num_kv_pages(cache: CacheConfig, demand: CacheDemand) -> int:
    """Pages of this rank's cache: `kv_cache_bytes` of them if given; else on a node min(25 % of its available memory /
    ranks on it, max_num_seqs full contexts), and on a GPU all that `gpu_memory_utilization` leaves. Raises ConfigError
    when one full context does not fit, with the largest max_model_len that does, and when there is less memory than is
    asked for. All ranks of a world take the smallest of their answers."""
    context = pages_of(demand.max_model_len, cache.page_size)
    budget, source = _budget(cache, demand)
    pages = budget // demand.bytes_per_page
    if not cache.kv_cache_bytes:
        pages = min(pages, MOST_PAGES if demand.room.total else demand.max_num_seqs * context)
    pages = min(pages, MOST_SLOTS // cache.page_size)
    if pages < context:
        needed = context * demand.bytes_per_page
        way_out = f"set max_model_len to at most {pages * cache.page_size}, or " if pages else "set "
        raise ConfigError(
            f"the KV cache of one context of {demand.max_model_len} tokens takes {_size(needed)} on this rank, but "
            f"{source}: {way_out}kv_cache_bytes to at least {needed}"
        )
    wanted = pages * demand.bytes_per_page * demand.ranks
    if 0 < demand.room.available < wanted:
        place, most = demand.room.place, demand.room.available // demand.ranks
        raise ConfigError(
            f"kv_cache_bytes is {cache.kv_cache_bytes}, {_size(wanted)} for {demand.ranks} rank(s) on the {place},"
            f" which has {_size(demand.room.available)} available: set it to at most {most}"
        )
    return pages


def _budget(cache: CacheConfig, demand: CacheDemand) -> tuple[int, str]:
    """Bytes of this rank's KV, and in words where they come from."""
    room, ranks = demand.room, demand.ranks
    if cache.kv_cache_bytes:
        return cache.kv_cache_bytes, f"kv_cache_bytes is {cache.kv_cache_bytes}"
    if not room.total:
        budget = int(room.available * DEFAULT_SHARE) // ranks
        return budget, (
            f"the budget is {_size(budget)} ({DEFAULT_SHARE:.0%} of {_size(room.available)} available memory"
            f" / {ranks} rank(s) on the node)"
        )
    used = room.total - room.available
    reserve = GPU_RESERVE + demand.step_bytes
    budget = max(0, int(room.total * cache.gpu_memory_utilization) - used - ranks * reserve) // ranks
    return budget, (
        f"the budget is {_size(budget)} (gpu_memory_utilization {cache.gpu_memory_utilization:g} of "
        f"{_size(room.total)}, less {_size(used)} that weights, buffers and others hold and {_size(reserve)} "
        f"a rank for steps, graphs and workspaces, / {ranks} rank(s) on the GPU; raise it, or end other programs)"
    )


def check_weights_fit(weight_bytes: int, room: Room, ranks: int) -> None:
    """ConfigError when the weights of the ranks that share `room`, of `weight_bytes` each, are more than it (0:
    unknown)."""
    needed = weight_bytes * ranks
    if 0 < room.available < needed:
        more = "take more GPUs (--ranks)" if room.total else "raise the container's limit"
        raise ConfigError(
            f"the weights of {ranks} rank(s) on this {room.place} take {_size(needed)} of memory, "
            f"{_size(room.available)} are available: end other programs, {more}, or take a smaller model"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
