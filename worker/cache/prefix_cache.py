"""PrefixCache: finds pages that already hold the KV of a request's first tokens, on the device and in host memory.

A full page is known by a key: 128 bits (BLAKE2b, RFC 7693) over the key of the page before it and its own tokens, so
that a key stands for everything up to its page's end; the first one hashes whatever else the KV depends on. Pages of
equal keys hold equal bits, since a token's KV depends on nothing else. A page that nobody holds stays cached until
its place is needed, the least recently used first and the end of a sequence before its beginning; what the device has
no room for moves to the host tier, when there is one, and comes back from there. (Hash-chained pages: Kwon et al.,
SOSP 2023, and Zheng et al., SGLang, NeurIPS 2024, for reuse between requests.)

Bookkeeping only: the copies that it decides on are in `take_copies`, and every rank makes them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.page_log import PageNews
from allspan.worker.cache.page_pool import Copy, PagePool


@dataclass(slots=True)
class Match:
    """The cached beginning of a request: pages one after the other, each on the device or (True) in the host tier."""

    keys: Sequence[bytes]
    pages: list[tuple[int, bool]] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def num_host_pages(self) -> int:
        return sum(is_host for _, is_host in self.pages)


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Numbers of pages, of one cache or of several together."""

    total: int
    used: int
    cached: int
    host_total: int = 0
    host_used: int = 0
    """The pages of the host tier that hold something."""

    @property
    def available(self) -> int:
        """The pages that no request holds."""
        return self.total - self.used

    def __add__(self, other: PageCounts) -> PageCounts:
        return PageCounts(*map(operator.add, astuple(self), astuple(other)))


class PrefixCache:
    """All pages of the device, with or without keys, and those of the host tier. Not thread-safe."""

    def __init__(self, num_pages: int, num_host_pages: int = 0, group: int = 0) -> None:
        """`group`: the index of the cache group that the pages are of."""
        self._group = group
        self.device = PagePool(num_pages)
        self.host = PagePool(num_host_pages) if num_host_pages else None
        self.generation = 0
        """Counts resets: keys made before the last one must not be inserted any more."""
        self.log: PageNews | None = None
        """Learns which pages can be found; its owner tells it of resets."""
        self._computing: dict[bytes, object] = {}
        self._saves: list[Copy] = []
        self._loads: list[Copy] = []
        self._pinned: list[int] = []

    @property
    def counts(self) -> PageCounts:
        """Its pages, by what they are."""
        device, host = self.device, self.host
        of_host = (0, 0) if host is None else (host.total, host.total - host.num_free)
        return PageCounts(device.total, device.num_used, device.num_cached, *of_host)

    def match(self, keys: Sequence[bytes]) -> Match:
        """The longest beginning of `keys` that is cached or in use somewhere."""
        found = Match(keys)
        for key in keys:
            page = self.find(key)
            if page is None:
                break
            found.pages.append(page)
        return found

    def find(self, key: bytes) -> tuple[int, bool] | None:
        """The page of this key, and whether it is in the host tier."""
        page = self.device.find(key)
        if page is not None:
            return page, False
        page = None if self.host is None else self.host.find(key)
        return None if page is None else (page, True)

    def fits(self, match: Match, num_pages: int, spare: int) -> bool:
        """Whether a request of `num_pages` pages that begins with `match` can have them, and `spare` pages be left."""
        taken = sum(not is_host and not self.device.references(page) for page, is_host in match.pages)
        fresh = num_pages - match.num_pages + match.num_host_pages
        return fresh + spare <= self.device.num_available - taken

    def take(self, match: Match, num_pages: int) -> list[int]:
        """The device pages of a request: those of `match`, held once more (loaded first, if they are in the host tier),
        and fresh ones. `fits` must have said yes, and nothing have changed since."""
        pages = []
        for page, is_host in match.pages:
            if is_host:
                self._pin(page)
            else:
                self.device.acquire(page)
        for key, (page, is_host) in zip(match.keys, match.pages, strict=False):
            if is_host:
                (target,) = self.allocate(1)
                self._loads.append(Copy(page, target, self._group))
                self.device.insert(key, target)
                self._computing.pop(key, None)
                if self.log is not None:
                    self.log.store(key, is_host=False)
                page = target
            pages.append(page)
        return pages + list(self.allocate(num_pages - len(pages)))

    def allocate(self, count: int) -> tuple[int, ...]:
        """Fresh pages, at the cost of the least recently used cached ones. InternalError when too many are in use."""
        for _ in range(min(count - self.device.num_free, self.device.num_cached)):
            page, key = self.device.evict()
            self._save(page, key)
            if self.log is not None:
                self._log_loss(self.log, key)
        return self.device.allocate(count)

    def insert(self, key: bytes, page: int) -> None:
        """A used page now holds the KV that `key` stands for."""
        self._computing.pop(key, None)
        self.device.insert(key, page)
        if self.log is not None:
            self.log.store(key, is_host=False)

    def release(self, pages: Sequence[int]) -> None:
        """A request gives back its pages, given in its order: of those that stay cached the last goes first."""
        self.device.release(reversed(pages))

    def announce(self, keys: Iterable[bytes], owner: object) -> None:
        """`owner` is about to compute the pages of these keys, unless another one is already."""
        for key in keys:
            self._computing.setdefault(key, owner)

    def withdraw(self, keys: Iterable[bytes], owner: object) -> None:
        """`owner` will not compute these any more."""
        for key in keys:
            if self._computing.get(key) is owner:
                del self._computing[key]

    def owner(self, key: bytes) -> object | None:
        """Returns what computes the page of this key; None: nothing does."""
        return self._computing.get(key)

    def owners(self) -> set[int]:
        """The identities of all who are computing pages."""
        return {id(owner) for owner in self._computing.values()}

    def settle(self) -> None:
        """The copies that were taken have been made everywhere: what they read may be given up again."""
        if self._pinned and not self._loads and self.host is not None:
            self.host.release(self._pinned)
            self._pinned.clear()

    def take_copies(self) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Saves (device → host) and loads (host → device) since the last call, in the order in which to make them: all
        saves before all loads."""
        saves, loads = tuple(self._saves), tuple(self._loads)
        self._saves.clear()
        self._loads.clear()
        return saves, loads

    def reset(self) -> None:
        """Forgets every key. Pages in use stay so until they are given back."""
        self.generation += 1
        self._computing.clear()
        self.device.forget_keys()
        if self.host is not None:
            self.host.forget_keys()

    def check(self) -> None:
        """Raises InternalError unless the books of both tiers are in order."""
        self.device.check()
        if self.host is not None:
            self.host.check()
            if self.host.num_used != len(self._pinned):
                raise InternalError(f"{self.host.num_used} host pages are in use, {len(self._pinned)} are being read")

    def _pin(self, page: int) -> None:
        """A host page that a load will read must not be given to a save of the same plan: saves are made first."""
        assert self.host is not None
        self.host.acquire(page)
        self._pinned.append(page)

    def _save(self, page: int, key: bytes) -> None:
        """What the device gives up goes to the host tier, unless that has it, or is full of pages being read."""
        if self.host is None:
            return
        known = self.host.find(key)
        if known is not None:
            self.host.touch(known)
            return
        if self.host.num_available == 0:
            return
        if self.host.num_free == 0:
            _, lost = self.host.evict()
            if self.log is not None:
                self._log_loss(self.log, lost)
        (target,) = self.host.allocate(1)
        self.host.insert(key, target)
        self.host.release((target,))
        self._saves.append(Copy(page, target, self._group))

    def _log_loss(self, log: PageNews, key: bytes) -> None:
        """Tells the log where a page is that one tier has given up."""
        found = self.find(key)
        if found is None:
            log.remove(key)
        else:
            log.store(key, is_host=found[1])
