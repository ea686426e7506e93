"""PageManager: which pages a request may begin with, which ones it gets, and what it leaves for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.budget import pages_of
from allspan.worker.cache.prefix_cache import Match, PrefixCache, page_keys, root_key
from allspan.worker.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """How full pages are kept for later requests."""

    enabled: bool = False
    model: str = ""
    """Its name, part of every key."""
    num_host_pages: int = 0


class PageManager:
    """Pages for requests, from the prefix cache or fresh. Not thread-safe."""

    def __init__(self, page_size: int, num_pages: int, settings: PrefixSettings) -> None:
        self.cache = PrefixCache(num_pages, settings.num_host_pages if settings.enabled else 0)
        self._weights_version = 1
        self._page_size = page_size
        self._settings = settings

    def match(self, request: Request) -> Match | None:
        """What the cache has of a request that is about to join; None when somebody is computing its next page right
        now, so that it had better wait. The last token is never matched: it must be computed to sample."""
        if not self.looks_up(request):
            return Match(())
        if request.awaits and self._is_awaited(request.awaits, request):
            return None
        keys = self._keys(request, (request.num_tokens - 1) // self._page_size)
        match = self.cache.match(keys)
        request.awaits = b""
        for key in keys[match.num_pages :]:  # up to the last one that is being computed: it is looked at next time
            if not self._is_awaited(key, request):
                break
            request.awaits = key
        return None if request.awaits else match

    def looks_up(self, request: Request) -> bool:
        """Whoever wants log-probabilities of the prompt needs every position computed."""
        return self._settings.enabled and request.options.prefix_cache and not request.wants_prompt_logprobs

    def fits(self, request: Request, match: Match, spare: int) -> bool:
        """Whether all pages of the request's tokens can be had, with `spare` ones left."""
        return self.cache.fits(match, pages_of(request.num_tokens, self._page_size), spare)

    def join(self, request: Request, match: Match) -> None:
        """Gives a request the pages of all its tokens, those of `match` first. `fits` must have said yes just now."""
        request.pages.extend(self.cache.take(match, pages_of(request.num_tokens, self._page_size)))
        request.num_computed = match.num_pages * self._page_size
        request.num_inserted = match.num_pages
        request.generation = -1
        if self._settings.enabled and request.options.prefix_cache:
            request.generation = self.cache.generation
            keys = self._keys(request, request.num_tokens // self._page_size)
            self.cache.announce(keys[match.num_pages :], request)

    def has_capacity(self, request: Request, tokens: int = 1) -> bool:
        """Whether its pages hold so many tokens more than are computed."""
        return request.num_computed + tokens <= len(request.pages) * self._page_size

    def extend(self, request: Request) -> tuple[int, ...] | None:
        """One page more, or None when every page is in use."""
        if self.cache.device.num_available == 0:
            return None
        page = self.cache.allocate(1)
        request.pages.extend(page)
        return page

    def commit_computed(self, request: Request) -> None:
        """The KV of `num_computed` tokens lies in its pages: those that have become full can be found from now on."""
        if request.generation != self.cache.generation:
            return
        full = request.num_computed // self._page_size
        if full > request.num_inserted:
            keys = self._keys(request, full)
            for i in range(request.num_inserted, full):
                self.cache.insert(keys[i], request.pages[i])
            request.num_inserted = full

    def release(self, request: Request) -> None:
        """Takes a request's pages back; the full ones of those who take part stay cached."""
        if request.generation == self.cache.generation:
            self.cache.withdraw(request.keys[request.num_inserted :], request)
        self.cache.release(request.pages)
        request.pages.clear()
        request.num_computed = 0
        request.num_inserted = 0

    def invalidate(self, weights_version: int) -> None:
        """Other weights: nothing that was computed holds any longer."""
        self._weights_version = weights_version
        self.cache.reset()

    def check(self, running: Sequence[Request]) -> None:
        """Raises InternalError unless every hold on a page is a running request's."""
        self.cache.check()
        holds = Counter(page for request in running for page in request.pages)
        pool = self.cache.device
        if len(holds) != pool.num_used or any(pool.references(page) != count for page, count in holds.items()):
            raise InternalError(f"the requests hold {len(holds)} pages, the pool knows of {pool.num_used}")
        beyond = [request for request in running if not self.has_capacity(request, 0)]
        if beyond:
            raise InternalError(f"request {beyond[0].request_id.hex()} has computed more than its pages hold")
        if not self.cache.owners() <= {id(request) for request in running}:
            raise InternalError("pages are awaited from a request that does not run")

    def _is_awaited(self, key: bytes, request: Request) -> bool:
        """Whether somebody computes the page of `key` whom `request` waits for: not one that goes after it."""
        owner = self.cache.owner(key)
        return isinstance(owner, Request) and owner.options.priority <= request.options.priority

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """The keys of the request's first `count` pages, which must be full."""
        keys, size = request.keys, self._page_size
        if len(keys) < count:
            before = keys[-1] if keys else self._root(request)
            keys += page_keys(before, request.tokens(len(keys) * size, count * size), size)
        return keys if len(keys) == count else keys[:count]

    def _root(self, request: Request) -> bytes:
        adapter = ""  # none yet
        return root_key(self._settings.model, self._weights_version, adapter, request.options.cache_salt)
