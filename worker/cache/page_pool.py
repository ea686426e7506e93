"""PagePool: which pages of the KV cache are free. Numbers only: what a page holds is the cache's affair."""

from __future__ import annotations

from collections.abc import Iterable

from allspan.protos.errors import InternalError


class PagePool:
    """Hands out page numbers 0 … total - 1, those freed last first, so that a small load stays in few pages."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise InternalError(f"a page pool of {total} pages, must be at least 1")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._is_used = bytearray(total)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.total - len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` pages that nobody holds. Raises InternalError when fewer are free: the caller looks first."""
        if not 0 <= count <= len(self._free):
            raise InternalError(f"{count} pages asked for, {len(self._free)} of {self.total} are free")
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._is_used[page] = 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back. Raises InternalError for one that is not held, before any is given back."""
        pages = tuple(pages)
        if len(set(pages)) != len(pages):
            raise InternalError(f"a page is released twice in one call: {pages}")
        for page in pages:
            if not 0 <= page < self.total or not self._is_used[page]:
                raise InternalError(f"page {page} is released, but nobody holds it (pool of {self.total})")
        for page in pages:
            self._is_used[page] = 0
        self._free.extend(reversed(pages))

    def check(self) -> None:
        """Raises InternalError unless free + used = total and no page is both."""
        if len(set(self._free)) != len(self._free) or any(self._is_used[page] for page in self._free):
            raise InternalError("a free page is listed twice or is in use")
        if len(self._free) + sum(self._is_used) != self.total:
            raise InternalError(f"{len(self._free)} free + {sum(self._is_used)} used pages are not {self.total}")
