"""PageGroup: the pages of one cache group, and which of them a request needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.budget import pages_of
from allspan.worker.cache.prefix_cache import Match, PrefixCache
from allspan.worker.scheduler.limits import GroupLimits
from allspan.worker.scheduler.request import HeldPages


class PageGroup:
    """Not thread-safe."""

    def __init__(self, index: int, limits: GroupLimits, page_size: int, step_tokens: int) -> None:
        """`step_tokens`: most tokens of a request in a step."""
        self.index = index
        self.limits = limits
        self.cache = PrefixCache(limits.num_pages, limits.num_host_pages, index)
        self._lifetime = limits.lifetime
        self._page_size = page_size
        self._step_tokens = step_tokens

    @property
    def keeps_all(self) -> bool:
        """Whether a request needs all of its beginning."""
        return self._lifetime.keeps_all

    def find(self, keys: Sequence[bytes]) -> list[tuple[int, bool] | None]:
        """Where the pages of these keys are cached; up to the first that is not, where all are needed."""
        if self.keeps_all:
            return [*self.cache.match(keys).pages]
        return [self.cache.find(key) for key in keys]

    def first_needed(self, num_computed: int) -> int:
        """The place of the first page that the queries from position `num_computed` on see."""
        return self._lifetime.first_seen(num_computed) // self._page_size

    def hits(self, found: Sequence[tuple[int, bool] | None]) -> list[bool]:
        """For each count of pages up to all that were looked for: whether a request can begin behind that many."""
        if self._lifetime.is_state:
            return [count == 0 for count in range(len(found) + 1)]
        possible, run = [True], 0
        for count, page in enumerate(found, start=1):
            run = run + 1 if page is not None else 0
            possible.append(run >= count - self.first_needed(count * self._page_size))
        return possible

    def part(self, keys: Sequence[bytes], found: Sequence[tuple[int, bool] | None], count: int) -> Match:
        """The cached pages that a request takes over when it begins behind `count` pages."""
        first = count if self._lifetime.is_state else self.first_needed(count * self._page_size)
        return Match(keys[first:count], [page for page in found[first:count] if page is not None])

    def pages_at_join(self, match: Match, count: int, num_tokens: int) -> tuple[int, int]:
        """First and last + 1 place of the pages that a request of `num_tokens` tokens gets when it joins behind `count`
        cached pages, those of `match` first."""
        if self._lifetime.is_state:
            return 0, 1
        first = count - match.num_pages
        return first, first + self.limits.most_pages(
            num_tokens - first * self._page_size, self._page_size, self._step_tokens
        )

    def lacking(self, held: HeldPages, num_tokens: int) -> int:
        """Pages that a request needs beside those it holds for its first `num_tokens` tokens."""
        return 0 if self._lifetime.is_state else max(0, pages_of(num_tokens, self._page_size) - held.last)

    def commit(self, held: HeldPages, keys: Sequence[bytes]) -> None:
        """The pages of `keys` are full: those that have become so can be found from now on."""
        if self._lifetime.is_state:
            return
        for place in range(held.num_inserted, len(keys)):
            self.cache.insert(keys[place], held.pages[place - held.first])
        held.num_inserted = max(held.num_inserted, len(keys))

    def release_behind(self, held: HeldPages, num_computed: int) -> None:
        """Gives back the pages that no later query sees."""
        if self._lifetime.window and (count := self.first_needed(num_computed) - held.first) > 0:
            self.cache.release(held.pages[:count])
            del held.pages[:count]
            held.first += count

    def release_beyond(self, held: HeldPages, num_tokens: int) -> None:
        """Gives back the pages past `num_tokens` tokens."""
        if (count := held.last - pages_of(num_tokens, self._page_size)) > 0 and not self._lifetime.is_state:
            self.cache.release(held.pages[-count:])
            del held.pages[-count:]

    def check(self, held: Iterable[HeldPages]) -> None:
        """Raises InternalError unless free, used and cached pages are all there are, and every hold on a page is one of
        `held`."""
        self.cache.check()
        holds, pool = Counter(page for each in held for page in each.pages), self.cache.device
        if len(holds) != pool.num_used or any(pool.references(page) != count for page, count in holds.items()):
            raise InternalError(
                f"the requests hold {len(holds)} pages of cache group {self.index}, the pool counts {pool.num_used}"
            )
