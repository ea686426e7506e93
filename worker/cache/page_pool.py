"""PagePool: which pages of one tier are free, used or cached, and under which key a page can be found again.

A page is free (no request holds it), used (a count of references) or cached (not held, but it has a key, so its
contents may serve once more). Numbers only: the pool does not know what a page contains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allspan.protos.api.errors import InternalError


@dataclass(frozen=True, slots=True)
class Copy:
    """A page whose contents go from one tier of the cache to the other."""

    source: int
    target: int
    group: int = 0
    owner: int = 0
    """The attention rank whose pages these are; of several others make no copy."""


class PagePool:
    """Pages 0 … total - 1. Those freed last are handed out first, so that a small load stays in few pages; of cached
    ones the least recently used is given up first."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise InternalError(f"a page pool of {total} pages, must be at least 1")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._cached: dict[int, None] = {}
        """Least recently used first."""
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.total - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """The number of pages that no request holds."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` free pages, now held once. Raises InternalError when fewer are free: the caller looks first."""
        if not 0 <= count <= len(self._free):
            raise InternalError(f"{count} pages asked for, {len(self._free)} of {self.total} are free")
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._references[page] = 1
        return pages

    def acquire(self, page: int) -> None:
        """Holds a used or cached page once more."""
        if self._references[page] == 0:
            if page not in self._cached:
                raise InternalError(f"page {page} is acquired, but it is free")
            del self._cached[page]
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Gives up one hold on each. Of those that are not held any more, the ones with a key stay cached, the first
        given to go first. Raises InternalError for one that is not held, before anything has changed."""
        pages = tuple(pages)
        if len(set(pages)) != len(pages):
            raise InternalError(f"a page is released twice in one call: {pages}")
        for page in pages:
            if not 0 <= page < self.total or not self._references[page]:
                raise InternalError(f"page {page} is released, but is not held (pool of {self.total})")
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def references(self, page: int) -> int:
        return self._references[page]

    def find(self, key: bytes) -> int | None:
        """The page of this key, used or cached."""
        return self._page_of.get(key)

    def insert(self, key: bytes, page: int) -> None:
        """A used page can be found by `key` from now on; a key that has a page keeps that one."""
        if self._references[page] == 0 or page in self._key_of:
            raise InternalError(f"page {page} gets a key, but it is not in use or has one")
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def touch(self, page: int) -> None:
        """A cached page counts as just used."""
        if page in self._cached:
            del self._cached[page]
            self._cached[page] = None

    def evict(self) -> tuple[int, bytes]:
        """Frees the least recently used cached page; its number and the key that it had."""
        page = next(iter(self._cached))
        del self._cached[page]
        self._free.append(page)
        key = self._key_of.pop(page)
        del self._page_of[key]
        return page, key

    def forget_keys(self) -> None:
        """Frees what is cached; what is used becomes free when it is given back."""
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        self._key_of.clear()
        self._page_of.clear()

    def check(self) -> None:
        """Raises InternalError unless free + used + cached = total, and each page is just one of them."""
        used = {page for page, count in enumerate(self._references) if count > 0}
        free, cached = set(self._free), set(self._cached)
        rules = {
            "no free page is listed twice": len(free) == len(self._free),
            "a page is free, used or cached": not (free & used or free & cached or used & cached),
            "free + used + cached = total": len(free) + len(used) + len(cached) == self.total,
            "the counts agree": (len(free), len(used), len(cached)) == (self.num_free, self.num_used, self.num_cached),
            "cached pages have keys, free ones none": cached <= self._key_of.keys() and not free & self._key_of.keys(),
            "a key names the page that has it": {page: key for key, page in self._page_of.items()} == self._key_of,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise InternalError(
                f"the page pool is inconsistent: {'; '.join(broken)} ({len(free)} free, {len(used)} used, "
                f"{len(cached)} cached of {self.total})"
            )
