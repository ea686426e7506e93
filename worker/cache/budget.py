"""How many KV pages a rank gets: asked once, before the cache is made, and refused early with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allspan.protos.api.errors import ConfigError
from allspan.protos.api.wording import counted
from allspan.protos.config.settings import CacheConfig
from allspan.worker.cache.spec import ALL_TOKENS, CacheGroup, PageLifetime

DEFAULT_SHARE = 0.25
"""The share of a node's available memory that the KV of all ranks on it takes."""
GPU_RESERVE = 3 << 29
"""The bytes of a GPU's memory left for what comes after the KV: captured graphs, workspaces, loaded kernels."""
MOST_PAGES = 2**20
"""The most pages taken unasked: a tiny model's would be so many that counting them takes seconds."""
MOST_SLOTS = 2**31
"""The most tokens of a cache: their places are int32."""


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
class GroupDemand:
    """A cache group of one rank: the bytes of a page, and how long a request keeps it."""

    bytes_per_page: int
    lifetime: PageLifetime = ALL_TOKENS


def group_demands(groups: Sequence[CacheGroup]) -> tuple[GroupDemand, ...]:
    """What a rank's cache groups ask of its memory."""
    return tuple(GroupDemand(group.spec.bytes_per_page, group.lifetime) for group in groups)


@dataclass(frozen=True, slots=True)
class CacheDemand:
    """What one rank's cache has to hold, and the memory (`room`; 0 bytes: unknown) that `ranks` share."""

    groups: tuple[GroupDemand, ...]
    max_model_len: int
    max_num_seqs: int
    room: Room
    ranks: int = 1
    step_bytes: int = 0
    """The bytes of a GPU's memory that this rank takes for the time of a step."""
    max_step_tokens: int = 1
    """Tokens of a step: a window's pages hold those beside what the first of them sees."""

    def context_pages(self, num_tokens: int, page_size: int) -> tuple[int, ...]:
        """The pages in each group without which a request of `num_tokens` tokens cannot run, in steps as short as they
        may be."""
        return tuple(
            lifetime.most_pages(num_tokens, page_size, lifetime.shortest_step(page_size, self.max_step_tokens))
            for lifetime in (group.lifetime for group in self.groups)
        )

    def most_pages(self, page_size: int) -> tuple[int, ...]:
        """The most pages that one request of a full context holds in each group, in steps as long as they may be."""
        most = self.max_model_len, page_size, self.max_step_tokens
        return tuple(group.lifetime.most_pages(*most) for group in self.groups)

    def bytes_of(self, pages: Sequence[int]) -> int:
        """The bytes of so many pages of each group."""
        return sum(count * group.bytes_per_page for count, group in zip(pages, self.groups, strict=True))


def pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_size)


def context_tokens(
    pages: Sequence[int], context_pages: Sequence[int], max_model_len: int, page_size: int
) -> tuple[int, ...]:
    """Returns for each cache group how many tokens its pages hold, in requests of a full context, each of which takes
    `context_pages`. Where a group keeps all tokens, these are those of its pages."""
    whole = pages_of(max_model_len, page_size)
    return tuple(count * whole // each * page_size for count, each in zip(pages, context_pages, strict=True))


def num_kv_pages(cache: CacheConfig, demand: CacheDemand) -> tuple[int, ...]:
    """The pages of this rank's cache, by cache group. All of them take `kv_cache_bytes` if given; else on a node
    min(25 % of its available memory / ranks on it, max_num_seqs full contexts), and on a GPU all that
    `gpu_memory_utilization` leaves. Each group gets the pages of one full context, and then all groups equally many
    more; a window beside groups that keep all tokens gets no more than max_num_seqs requests can hold.

    Raises ConfigError when one full context does not fit, with the largest max_model_len that does, and when there is
    less memory than is asked for. All ranks of a world take the smallest of their answers.
    """
    longest = MOST_SLOTS // cache.page_size * cache.page_size
    if demand.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {demand.max_model_len}, must be at most {longest}: the KV cache numbers its places "
            "in 32 bits"
        )
    least = demand.context_pages(demand.max_model_len, cache.page_size)
    budget, source = _budget(cache, demand)
    if (needed := demand.bytes_of(least)) > budget:
        longest = _longest(budget, demand, cache.page_size)
        way_out = f"set max_model_len to at most {longest}, or " if longest else "set "
        raise ConfigError(
            f"the KV cache of one context of {demand.max_model_len} tokens takes {_size(needed)} on this rank, but "
            f"{source}: {way_out}kv_cache_bytes to at least {needed}"
        )
    pages = _share(budget, demand, least, _most(cache, demand))
    wanted = demand.bytes_of(pages) * demand.ranks
    if 0 < demand.room.available < wanted:
        place, most = demand.room.place, demand.room.available // demand.ranks
        raise ConfigError(
            f"kv_cache_bytes is {cache.kv_cache_bytes}, {_size(wanted)} for {counted(demand.ranks, 'rank')} on "
            f"the {place}, which has {_size(demand.room.available)} available: set it to at most {most}"
        )
    return pages


def _most(cache: CacheConfig, demand: CacheDemand) -> list[int]:
    """The most pages that each group may get."""
    keeps_all = any(group.lifetime.keeps_all for group in demand.groups)
    most = []
    for group, pages in zip(demand.groups, demand.most_pages(cache.page_size), strict=True):
        limit = MOST_SLOTS // cache.page_size
        if keeps_all and not group.lifetime.keeps_all:
            limit = min(limit, demand.max_num_seqs * pages)
        if not cache.kv_cache_bytes:
            limit = min(limit, MOST_PAGES if demand.room.total else demand.max_num_seqs * pages)
        most.append(max(limit, pages))
    return most


def _share(budget: int, demand: CacheDemand, least: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    """`least` pages of each group, and equally many more of all groups that have not their `most` yet."""
    pages, left = list(least), budget - demand.bytes_of(least)
    while growing := [i for i, count in enumerate(pages) if count < most[i]]:
        each = sum(demand.groups[i].bytes_per_page for i in growing)
        more = min(left // each, *(most[i] - pages[i] for i in growing))
        if not more:
            break
        for i in growing:
            pages[i] += more
        left -= more * each
    return tuple(pages)


def _longest(budget: int, demand: CacheDemand, page_size: int) -> int:
    """The longest context, in whole pages, that the budget holds."""
    low, high = 0, pages_of(demand.max_model_len, page_size)
    while low < high:
        middle = (low + high + 1) // 2
        fits = demand.bytes_of(demand.context_pages(middle * page_size, page_size)) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * page_size


def _budget(cache: CacheConfig, demand: CacheDemand) -> tuple[int, str]:
    """Bytes of this rank's KV, and in words where they come from."""
    room, ranks = demand.room, demand.ranks
    if cache.kv_cache_bytes:
        return cache.kv_cache_bytes, f"kv_cache_bytes is {cache.kv_cache_bytes}"
    if not room.total:
        budget = int(room.available * DEFAULT_SHARE) // ranks
        return budget, (
            f"the budget is {_size(budget)} ({DEFAULT_SHARE:.0%} of {_size(room.available)} available memory"
            f" / {counted(ranks, 'rank')} on the node)"
        )
    used = room.total - room.available
    reserve = GPU_RESERVE + demand.step_bytes
    budget = max(0, int(room.total * cache.gpu_memory_utilization) - used - ranks * reserve) // ranks
    return budget, (
        f"the budget is {_size(budget)} (gpu_memory_utilization {cache.gpu_memory_utilization:g} of "
        f"{_size(room.total)}, less {_size(used)} that weights, buffers and others hold and {_size(reserve)} "
        f"a rank for steps, graphs and workspaces, / {counted(ranks, 'rank')} on the GPU; raise it, or end "
        "other programs)"
    )


def check_weights_fit(weight_bytes: int, room: Room, ranks: int) -> None:
    """ConfigError when the weights of the ranks that share `room`, of `weight_bytes` each, are more than it (0:
    unknown)."""
    needed = weight_bytes * ranks
    if 0 < room.available < needed:
        more = "take more GPUs (--ranks)" if room.total else "raise the container's limit"
        raise ConfigError(
            f"the weights of {counted(ranks, 'rank')} on this {room.place} take {_size(needed)} of memory, "
            f"{_size(room.available)} are available: end other programs, {more}, or take a smaller model"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
