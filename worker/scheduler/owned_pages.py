"""OwnedPages: the pages of several attention ranks, of which each has a pool and a prefix cache of its own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.page_log import OwnerLog, PageLog
from allspan.worker.cache.page_pool import Copy
from allspan.worker.cache.prefix_cache import PageCounts
from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.page_manager import PageManager, PrefixHit, PrefixSettings
from allspan.worker.scheduler.plan import Grant
from allspan.worker.scheduler.request import Request

COMPUTED = 8
"""A token that is still to be computed counts as so many that are held: it goes through the weights of all ranks, those
held are read by one, once a step."""


class OwnedPages:
    """What `PageManager` is, for as many of them: a request has its pages with one, its owner. Not thread-safe."""

    def __init__(self, limits: Limits, settings: PrefixSettings) -> None:
        whole, places = PageLog(limits.page_size), dict[bytes, dict[int, bool]]()
        owners = range(limits.attention_ranks)
        self.managers = tuple(PageManager(limits, settings, OwnerLog(whole, places, owner)) for owner in owners)
        self.log = whole if self.managers[0].is_told else None
        """What any of them has."""
        self._page_size = limits.page_size
        self._running: tuple[set[Request], ...] = tuple(set() for _ in owners)
        """The requests that have pages, by owner."""

    @property
    def counts(self) -> tuple[PageCounts, ...]:
        """The pages of each cache group, of all owners together."""
        groups = zip(*(manager.counts for manager in self.managers), strict=True)
        return tuple(functools.reduce(operator.add, group) for group in groups)

    @property
    def told_counts(self) -> PageCounts:
        """The pages of the group that `log` is of, of all owners together."""
        return functools.reduce(operator.add, (manager.told_counts for manager in self.managers))

    def match(self, request: Request) -> tuple[PrefixHit, ...] | None:
        """What each owner's cache has of a request that is about to join, the best choice first: where the tokens that
        the owner's requests hold, and those of this one that it has not cached, times COMPUTED, are fewest. None when
        one computes its next page right now, unless another has all of its pages."""
        if any(manager.still_awaits(request) for manager in self.managers):
            return None
        hits: list[PrefixHit] = []
        awaited = b""
        for owner, manager in enumerate(self.managers):
            hits += [replace(hit, owner=owner) for hit in manager.match(request) or ()]
            awaited = awaited or request.awaits
        most = (request.num_tokens - 1) // self._page_size
        request.awaits = awaited if all(hit.num_pages < most for hit in hits) else b""
        if request.awaits:
            return None
        saved = COMPUTED * self._page_size
        return tuple(sorted(hits, key=lambda hit: self._tokens(hit.owner) - saved * hit.num_pages))

    def looks_up(self, request: Request) -> bool:
        """See `PageManager.looks_up`."""
        return self.managers[0].looks_up(request)

    def fits(
        self, request: Request, hit: PrefixHit, staying: Sequence[Request], leaving: Sequence[Request] = ()
    ) -> bool:
        """See `PageManager.fits`; what other owners' requests hold does not matter."""
        stay, leave = ([other for other in each if other.owner == hit.owner] for each in (staying, leaving))
        return self.managers[hit.owner].fits(request, hit, stay, leave)

    def join(self, request: Request, hit: PrefixHit) -> list[Grant]:
        """See `PageManager.join`; sets `request.owner`."""
        request.owner = hit.owner
        self._running[hit.owner].add(request)
        return self.managers[hit.owner].join(request, hit)

    def has_capacity(self, request: Request, tokens: int) -> bool:
        """See `PageManager.has_capacity`."""
        return self.managers[request.owner].has_capacity(request, tokens)

    def extend(self, request: Request, tokens: int) -> list[Grant] | None:
        """See `PageManager.extend`."""
        return self.managers[request.owner].extend(request, tokens)

    def extend_for_drafts(self, request: Request, count: int, running: Sequence[Request]) -> tuple[int, list[Grant]]:
        """See `PageManager.extend_for_drafts`; other owners' requests do not matter."""
        own = [other for other in running if other.owner == request.owner]
        return self.managers[request.owner].extend_for_drafts(request, count, own)

    def extend_for_drafter(self, request: Request, tokens: int, running: Sequence[Request]) -> list[Grant] | None:
        """See `PageManager.extend_for_drafter`; other owners' requests do not matter."""
        own = [other for other in running if other.owner == request.owner]
        return self.managers[request.owner].extend_for_drafter(request, tokens, own)

    def retract(self, request: Request) -> None:
        """See `PageManager.retract`."""
        self.managers[request.owner].retract(request)

    @property
    def can_retract(self) -> bool:
        """See `PageManager.can_retract`."""
        return self.managers[0].can_retract

    def commit_computed(self, request: Request) -> None:
        """See `PageManager.commit_computed`."""
        self.managers[request.owner].commit_computed(request)

    def commit_drafted(self, request: Request, num_drafts: int) -> None:
        """See `PageManager.commit_drafted`."""
        self.managers[request.owner].commit_drafted(request, num_drafts)

    def release(self, request: Request) -> None:
        """See `PageManager.release`."""
        self._running[request.owner].discard(request)
        self.managers[request.owner].release(request)

    def settle(self) -> None:
        """See `PrefixCache.settle`."""
        for manager in self.managers:
            manager.settle()

    def take_copies(self) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """See `PrefixCache.take_copies`; each copy names its owner."""
        saves, loads = [], []
        for owner, manager in enumerate(self.managers):
            own = manager.take_copies()
            saves += [replace(copy, owner=owner) for copy in own[0]]
            loads += [replace(copy, owner=owner) for copy in own[1]]
        return tuple(saves), tuple(loads)

    def reset(self) -> None:
        """See `PageManager.reset`."""
        for manager in self.managers:
            manager.reset()

    def invalidate(self, weights_version: int) -> None:
        """See `PageManager.invalidate`."""
        for manager in self.managers:
            manager.invalidate(weights_version)

    def check(self, running: Sequence[Request]) -> None:
        """See `PageManager.check`."""
        for owner, manager in enumerate(self.managers):
            own = [request for request in running if request.owner == owner]
            manager.check(own)
            if self._running[owner] != set(own):
                raise InternalError(f"attention rank {owner} counts other requests than those whose pages it has")

    def _tokens(self, owner: int) -> int:
        """The tokens of an owner's requests."""
        return sum(request.num_tokens for request in self._running[owner])


def page_memory(limits: Limits, settings: PrefixSettings) -> PageManager | OwnedPages:
    """The pages of a scheduler: of several attention ranks each has its own."""
    return PageManager(limits, settings) if limits.attention_ranks == 1 else OwnedPages(limits, settings)
