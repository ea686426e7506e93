"""PageManager: which pages a request may begin with, which ones it gets, and what it leaves for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allspan.protos.api.errors import InternalError
from allspan.protos.page_keys import page_keys, root_key
from allspan.worker.cache.page_log import PageLog, PageNews
from allspan.worker.cache.page_pool import Copy
from allspan.worker.cache.prefix_cache import Match, PageCounts, PrefixCache
from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.page_group import PageGroup
from allspan.worker.scheduler.plan import Grant
from allspan.worker.scheduler.request import HeldPages, Request


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """How full pages are kept for later requests."""

    enabled: bool = False
    model: str = ""
    """Its name, part of every key."""
    num_host_pages: int = 0


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached beginning of a request, in whole pages."""

    num_pages: int
    """The number of cached pages that the request begins behind."""
    parts: tuple[Match, ...]
    """For each cache group, the last of these pages, which later tokens still see."""
    owner: int = 0
    """The attention rank whose pages these are."""

    @property
    def num_host_pages(self) -> int:
        return self.parts[0].num_host_pages


class PageManager:
    """Pages for requests, from the prefix cache or fresh, in every cache group. Not thread-safe."""

    def __init__(self, limits: Limits, settings: PrefixSettings, news: PageNews | None = None) -> None:
        """`news`: is told what becomes of pages instead of a log of this manager's own."""
        groups = limits.groups(settings.num_host_pages if settings.enabled else 0)
        self.groups = tuple(
            PageGroup(i, group, limits.page_size, limits.max_chunk_tokens) for i, group in enumerate(groups)
        )
        self._keeps_all = len(self.groups) == 1 and self.groups[0].keeps_all
        self._windows = tuple(group for group in self.groups if group.limits.lifetime.window)
        self._model = tuple(group for group in self.groups if not group.limits.is_drafter)
        self._drafter = tuple(group for group in self.groups if group.limits.is_drafter)
        """Their pages hold what the drafter has taken in, which may be less than what the model has computed, or more
        by one token: a request may begin behind fewer cached pages of them."""
        self._ahead = tuple(group for group in self.groups if group.limits.is_drafter or group.limits.is_head)
        self._weights_version = 1
        self._page_size = limits.page_size
        self._settings = settings
        self._row_inputs = limits.row_inputs
        logged = next((group for group in self._model if group.keeps_all), self.groups[0])
        self.log: PageLog | None = None
        """What requests may begin with: the pages of the group that keeps whole contexts, where there is one."""
        self._logged = logged.index
        if settings.enabled and not logged.limits.lifetime.is_state:
            self.log = PageLog(limits.page_size) if news is None else None
            logged.cache.log = self.log if news is None else news

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache of the first group, which also knows the pages that are being computed."""
        return self.groups[0].cache

    @property
    def is_told(self) -> bool:
        """Whether a log is told of its pages."""
        return self.groups[self._logged].cache.log is not None

    @property
    def counts(self) -> tuple[PageCounts, ...]:
        """The pages of each cache group."""
        return tuple(group.cache.counts for group in self.groups)

    @property
    def told_counts(self) -> PageCounts:
        """The pages of the group that `log` is of."""
        return self.groups[self._logged].cache.counts

    def match(self, request: Request) -> tuple[PrefixHit, ...] | None:
        """What the cache has of a request that is about to join, as the one choice that there is; None when another one
        computes its next page right now, so that it had better wait. The last token is never matched: it must be
        computed to sample."""
        if not self.looks_up(request):
            return (self._hit(()),)
        if self.still_awaits(request):
            return None
        keys = self._keys(request, (request.num_tokens - 1) // self._page_size)
        hit = self._hit(keys)
        request.awaits = b""
        for key in keys[hit.num_pages :]:  # up to the last one that is being computed: it is looked at next time
            if not self._is_awaited(key, request):
                break
            request.awaits = key
        return None if request.awaits else (hit,)

    def still_awaits(self, request: Request) -> bool:
        """Whether the page that the request was last found to wait for is still being computed."""
        return bool(request.awaits) and self._is_awaited(request.awaits, request)

    def looks_up(self, request: Request) -> bool:
        """Whether the request may begin with cached pages; log-probabilities of its prompt and pooling that reads other
        tokens than the last need every position."""
        needs_all = request.wants_prompt_logprobs or request.options.pooling in ("mean", "cls")
        return self._settings.enabled and request.options.prefix_cache and not needs_all

    def fits(
        self, request: Request, hit: PrefixHit, staying: Sequence[Request], leaving: Sequence[Request] = ()
    ) -> bool:
        """Whether the request can join, with a page of each group left for every one that is `staying`, once those
        `leaving` have given theirs back."""
        for i, (group, part) in enumerate(zip(self.groups, hit.parts, strict=True)):
            first, last = group.pages_at_join(part, _begin(group, part, hit), request.num_tokens)
            freed = sum(len(other.held[i].pages) for other in leaving)
            if not group.cache.fits(part, last - first, len(staying) - freed):
                return False
        return True

    def join(self, request: Request, hit: PrefixHit) -> list[Grant]:
        """Gives a request its first pages, those of `hit` first: all that its tokens need, or as many as the longest
        step in a window. `fits` must have said yes just now."""
        grants = []
        for group, part in zip(self.groups, hit.parts, strict=True):
            begin = _begin(group, part, hit)
            first, last = group.pages_at_join(part, begin, request.num_tokens)
            held = HeldPages(first, group.cache.take(part, last - first), begin)
            request.held.append(held)
            grants.append(Grant(request.row, tuple(held.pages), group.index, first))
        request.num_computed = hit.num_pages * self._page_size
        request.num_drafted = request.held[-1].num_inserted * self._page_size if self._drafter else 0
        request.generation = -1
        if self._settings.enabled and request.options.prefix_cache:
            request.generation = self.cache.generation
            keys = self._keys(request, request.num_tokens // self._page_size)
            self.cache.announce(keys[hit.num_pages :], request)
        return grants

    def has_capacity(self, request: Request, tokens: int) -> bool:
        """Whether its pages have places for `tokens` more than are computed."""
        total = request.num_computed + tokens
        if self._keeps_all:  # most models: nothing was given back, and the page table is all there is to look at
            return total <= len(request.held[0].pages) * self._page_size
        return not any(group.lacking(held, total) for group, held in zip(self.groups, request.held, strict=True))

    def extend(self, request: Request, tokens: int) -> list[Grant] | None:
        """Returns pages for `tokens` more than are computed, or None when there are not enough."""
        total = request.num_computed + tokens
        lacking = [group.lacking(held, total) for group, held in zip(self.groups, request.held, strict=True)]
        if any(count > group.cache.device.num_available for group, count in zip(self.groups, lacking, strict=True)):
            return None
        grants = []
        for group, held, count in zip(self.groups, request.held, lacking, strict=True):
            if count:
                grants.append(Grant(request.row, group.cache.allocate(count), group.index, held.last))
                held.pages.extend(grants[-1].pages)
        return grants

    def extend_for_drafts(self, request: Request, count: int, running: Sequence[Request]) -> tuple[int, list[Grant]]:
        """How many of `count` drafts behind the next token there are pages for, and those pages. Another page is taken
        only where one more is left in each group for all that are `running`: drafts take no page that a request
        needs."""
        spare = min(group.cache.device.num_available for group in self.groups)
        if not self.has_capacity(request, 1 + count) and spare > len(running):
            grants = self.extend(request, 1 + min(count, self._page_size))
            return min(count, self._page_size), grants or []
        while count and not self.has_capacity(request, 1 + count):
            count -= 1
        return count, []

    def extend_for_drafter(self, request: Request, tokens: int, running: Sequence[Request]) -> list[Grant] | None:
        """Returns pages of the groups that a drafter writes to, for the first `tokens` of the request, or None where
        these would leave less than a page for each of those that are `running`."""
        lacking = [group.lacking(request.held[group.index], tokens) for group in self._ahead]
        for group, count in zip(self._ahead, lacking, strict=True):
            if count and group.cache.device.num_available - count < len(running):
                return None
        grants = []
        for group, count in zip(self._ahead, lacking, strict=True):
            if count:
                held = request.held[group.index]
                grants.append(Grant(request.row, group.cache.allocate(count), group.index, held.last))
                held.pages.extend(grants[-1].pages)
        return grants

    def retract(self, request: Request) -> None:
        """Gives back the model's pages that were taken for drafts that were not kept."""
        for group in self._model:
            group.release_beyond(request.held[group.index], request.num_tokens)

    @property
    def can_retract(self) -> bool:
        """Whether tokens can be taken out of the cache again. Not where a page holds a state of all of them."""
        return not any(group.limits.lifetime.is_state for group in self.groups)

    def commit_computed(self, request: Request) -> None:
        """The KV of `num_computed` tokens lies in its pages: those that have become full can be found from now on, and
        those that no later token sees are given back."""
        full = request.num_computed // self._page_size
        if full > request.held[0].num_inserted and request.generation == self.cache.generation:
            keys, news = self._keys(request, full), self.groups[self._logged].cache.log
            if news is not None:
                first = request.held[self._logged].num_inserted
                tokens = request.tokens(first * self._page_size, full * self._page_size)
                news.describe(keys, first, tokens, request.adapter)
            for group in self._model:
                group.commit(request.held[group.index], keys)
            if news is not None:
                news.described()
        for group in self._windows:
            group.release_behind(request.held[group.index], request.num_computed)

    def commit_drafted(self, request: Request, num_drafts: int) -> None:
        """The drafter has taken in `num_drafted` tokens, and proposed so many behind them: its pages that have become
        full can be found from now on, and those that it does not need go back."""
        full = request.num_drafted // self._page_size
        for group in self._drafter:
            held = request.held[group.index]
            if full > held.num_inserted and request.generation == self.cache.generation:
                group.commit(held, self._keys(request, full))
            group.release_beyond(held, max(request.num_tokens, request.num_drafted + num_drafts))

    def release(self, request: Request) -> None:
        """Takes a request's pages back; the full ones of a request that takes part in the prefix cache stay cached."""
        if request.generation == self.cache.generation:
            self.cache.withdraw(request.keys[request.held[0].num_inserted :], request)
        for group, held in zip(self.groups, request.held, strict=True):
            group.cache.release(held.pages)
        request.held.clear()
        request.num_computed = request.num_drafted = 0

    def settle(self) -> None:
        """See `PrefixCache.settle`."""
        for group in self.groups:
            group.cache.settle()

    def take_copies(self) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """See `PrefixCache.take_copies`."""
        if len(self.groups) == 1:
            return self.cache.take_copies()
        copies = [group.cache.take_copies() for group in self.groups]
        return tuple(save for saves, _ in copies for save in saves), tuple(
            load for _, loads in copies for load in loads
        )

    def reset(self) -> None:
        """Forgets every cached page; those in use are forgotten when they are given back."""
        for group in self.groups:
            group.cache.reset()
        if (news := self.groups[self._logged].cache.log) is not None:
            news.clear(self._weights_version)

    def invalidate(self, weights_version: int) -> None:
        """Other weights: nothing that was computed holds any longer."""
        self._weights_version = weights_version
        self.reset()

    def check(self, running: Sequence[Request]) -> None:
        """Raises InternalError unless every hold on a page is a running request's."""
        for i, group in enumerate(self.groups):
            group.check(request.held[i] for request in running)
        beyond = [request for request in running if not self.has_capacity(request, 0)]
        if beyond:
            raise InternalError(f"request {beyond[0].request_id.hex()} has computed more than its pages hold")
        if not self.cache.owners() <= {id(request) for request in running}:
            raise InternalError("pages are awaited from a request that does not run")

    def _hit(self, keys: Sequence[bytes]) -> PrefixHit:
        """The longest beginning behind which every group of the model has what later tokens see of it, and what those
        of a drafter have of that."""
        count = len(keys)
        found: dict[int, list[tuple[int, bool] | None]] = {}
        for group in sorted(self._model, key=lambda group: not group.keeps_all):
            pages = found[group.index] = group.find(keys[:count])
            count = len(pages)
        possible = [group.hits(found[group.index]) for group in self._model if not group.keeps_all]
        while not all(each[count] for each in possible):
            count -= 1
        parts = [group.part(keys, found[group.index], count) for group in self._model]
        drafted = min((group.cache.match(keys[:count]).num_pages for group in self._drafter), default=0)
        return PrefixHit(count, (*parts, *(group.cache.match(keys[:drafted]) for group in self._drafter)))

    def _is_awaited(self, key: bytes, request: Request) -> bool:
        """Whether a request computes the page of `key` that `request` waits for: not one that goes after it."""
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
        adapter, digests = request.model_inputs
        table, salt = self._row_inputs.table_of(len(request.prompt_token_ids)), request.options.cache_salt
        return root_key(self._settings.model, self._weights_version, adapter, digests.hex(), table, salt)


def _begin(group: PageGroup, part: Match, hit: PrefixHit) -> int:
    """How many cached pages a request begins behind in a group."""
    return part.num_pages if group.limits.is_drafter else hit.num_pages
