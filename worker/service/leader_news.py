"""What a Results stream tells of the leader beside outputs: its load, its adapters, the changes of its prefix cache."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.convert import adapters_to_wire
from allspan.protos.page_keys import short_key
from allspan.worker.cache.page_log import CachedPage, PageLog
from allspan.worker.scheduler.counters import Load

MAX_PAGES = 1024
"""Pages in a message; one of them takes a millisecond or two to make, in which no step is planned."""
KEYS, TOKEN_IDS = 1, 2
"""See `ResultsSubscription.page_events`."""
MEDIA = ("GPU", "CPU")
LOAD_S = 0.25
"""Least time between two words of the load on a stream: counting takes half a microsecond an open request."""


Listed = tuple[int, tuple[AdapterModule, ...]]
"""See `LiveAdapters.listed`."""


class PageEventStream:
    """The events for one stream, to be closed."""

    def __init__(self, log: PageLog, prompt_lengths: tuple[int, ...], with_tokens: bool) -> None:
        """`prompt_lengths`: see `PageEvents.prompt_lengths`."""
        self._reader = log.open()
        self._prompt_lengths = prompt_lengths
        self._with_tokens = with_tokens
        self._sequence = 0

    def next(self) -> pb.PageEvents | None:
        """What to tell now; None: nothing is new."""
        changes = self._reader.take(MAX_PAGES)
        if changes is None:
            return None
        log = self._reader.log
        message = pb.PageEvents(
            sequence=self._sequence,
            cleared=changes.is_new,
            stored=[self._stored(key, page) for key, page in changes.stored],
            removed=[short_key(key) for key in changes.removed],
            page_tokens=log.page_size,
        )
        if changes.is_new:
            message.weights_version = log.weights_version
            message.prompt_lengths.extend(self._prompt_lengths)
        self._sequence += 1
        return message

    def restart(self) -> None:
        """What is told next begins with all that is cached."""
        self._reader.restart()

    def close(self) -> None:
        """Must be called once."""
        self._reader.close()

    def _stored(self, key: bytes, page: CachedPage) -> pb.PageStored:
        before, tokens, is_host, adapter = page
        if not self._with_tokens:
            return pb.PageStored(key=short_key(key), medium=MEDIA[is_host])
        return pb.PageStored(
            key=short_key(key),
            parent=short_key(before),
            token_ids=array("i", tokens),
            medium=MEDIA[is_host],
            lora_id=adapter + 1,
        )


class LeaderNews:
    """What one stream tells beside outputs: with nothing given, nothing."""

    def __init__(
        self,
        load: Callable[[], Load] | None = None,
        adapters: Callable[[], Listed] | None = None,
        pages: PageEventStream | None = None,
    ) -> None:
        self._load, self._adapters = load, adapters
        self._told_version = -1
        self._pages = pages
        self._told_at = float("-inf")
        self.has_more = False
        """The next message has page events without waiting for anything."""

    def add_to(self, message: pb.StepOutputs) -> None:
        """Adds what is new."""
        now = time.monotonic()
        if self._load is not None and now - self._told_at >= LOAD_S:
            self._told_at = now
            load = self._load()
            message.load.running, message.load.waiting = load.running, load.waiting
            message.load.queued_tokens, message.load.cached_pages = load.queued_tokens, load.cached_pages
            message.load.pages_used, message.load.pages_total = load.pages_used, load.pages_total
        if self._adapters is not None:
            version, adapters = self._adapters()
            if version != self._told_version:
                self._told_version = version
                message.adapters.CopyFrom(adapters_to_wire(version, adapters))
        if self._pages is not None:
            events = self._pages.next()
            if events is not None:
                message.page_events.append(events)
            self.has_more = events is not None and len(events.stored) + len(events.removed) == MAX_PAGES

    def resend_pages(self) -> None:
        """Has the next message begin with all that is cached, where pages are told."""
        if self._pages is not None:
            self._pages.restart()

    def close(self) -> None:
        """Must be called once."""
        if self._pages is not None:
            self._pages.close()


def check_page_events(value: int) -> None:
    """Raises InvalidRequest for a value of `ResultsSubscription.page_events` that has no meaning."""
    if value > TOKEN_IDS:
        raise InvalidRequest(f"page_events is {value}, must be 0 (none), 1 (keys) or 2 (with token ids)", "page_events")
