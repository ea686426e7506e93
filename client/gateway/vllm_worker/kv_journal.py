"""The changes of the prefix caches as numbered batches, kept for subscribers that come later or come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from types import TracebackType

from allspan.client.gateway.kv_events.batches import rows
from allspan.protos import vllm_worker_pb2 as pb
from allspan.protos import worker_pb2

MOST_BYTES = 64 * 2**20
"""Bytes of the batches that are kept; the pages that are cached come in addition."""
CHUNK_PAGES = 1024
"""Pages in a message of a snapshot."""
_TIERS = {"GPU": 1, "CPU": 2}

logger = logging.getLogger("allspan.gateway")

Sources = Callable[[], Sequence[AsyncGenerator[worker_pb2.PageEvents, None]]]
_Place = tuple[int, str]
"""A page's key and its medium."""


class KvJournal:
    """The batches of all replicas as of one worker: a page is stored with the first replica that holds it and removed
    with the last. It reads from its first subscriber on. Numbers begin at the milliseconds since 1970, so that one
    of an earlier process is never taken for one of this."""

    def __init__(self, sources: Sources, most_batches: int = 10_000) -> None:
        self._sources = sources
        self._most_batches = most_batches
        self._tasks: list[asyncio.Task[None]] = []
        self._first = self.last = int(time.time() * 1000)
        self._kept: deque[pb.KvEventBatch] = deque()
        self._kept_bytes = 0
        self._media: dict[int, dict[int, str]] = {}
        """The medium of each key that a replica holds, by replica."""
        self._holders: dict[_Place, int] = {}
        self._pages: dict[_Place, worker_pb2.PageStored] = {}
        self._page_tokens = 0
        self._event_id = 0
        self._news = asyncio.Event()

    async def __aenter__(self) -> KvJournal:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self) -> None:
        """Reads the sources from now on. Idempotent."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._follow(replica, source)) for replica, source in enumerate(self._sources())
            ]
            for task in self._tasks:
                task.add_done_callback(_report)

    def reaches(self, number: int) -> bool:
        """True if all that came after this number is kept."""
        return self.last - len(self._kept) <= number <= self.last

    def after(self, number: int) -> list[pb.KvEventBatch]:
        """Returns the batches behind a number that is kept."""
        count = self.last - number
        return list(self._kept)[-count:] if count else []

    def snapshot(self) -> Iterator[pb.KvEventBatch]:
        """Returns all that is cached now, in chunks whose numbers end at `last`; nothing before the first batch."""
        if self.last == self._first:
            return iter(())
        return self._chunks(list(self._pages.values()), self.last)

    async def news(self, timeout: float) -> None:
        """Waits for a batch, at most so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._news.wait()

    async def _follow(self, replica: int, source: AsyncGenerator[worker_pb2.PageEvents, None]) -> None:
        async with contextlib.aclosing(source) as news:
            async for told in news:
                self._page_tokens = told.page_tokens
                if events := self._events(told, self._media.setdefault(replica, {})):
                    self._add(events)

    def _events(self, told: worker_pb2.PageEvents, media: dict[int, str]) -> list[pb.KvCacheEvent]:
        """`media`: those of the replica's pages, which it changes."""
        events: list[pb.KvCacheEvent] = []
        gone: list[_Place] = []
        if told.cleared:
            gone += self._given_up(media.items())
            media.clear()
            if not self._pages:
                gone.clear()
                events.append(pb.KvCacheEvent(cleared=pb.KvCacheCleared()))
        gone += self._given_up((key, media.pop(key)) for key in told.removed if key in media)
        new = []
        for page in told.stored:
            if page.lora_id:
                continue  # the contract cannot tell it from a page of the model itself
            before = media.get(page.key)
            if before == page.medium:
                continue
            if before is not None:
                gone += self._given_up([(page.key, before)])
            media[page.key] = page.medium
            place = (page.key, page.medium)
            self._holders[place] = self._holders.get(place, 0) + 1
            if place not in self._pages:
                self._pages[place] = page
                new.append(page)
        for medium, tier in _TIERS.items():
            if keys := [_signed(key) for key, where in gone if where == medium]:
                fields = pb.KvBlocksRemoved(block_hashes=keys, cache_level=tier - 1, tier=tier, medium=medium)
                events.append(pb.KvCacheEvent(removed=fields))
        return events + self._stored(new)

    def _given_up(self, places: Iterable[_Place]) -> list[_Place]:
        """Returns those that no replica holds any more."""
        gone = []
        for place in list(places):
            self._holders[place] -= 1
            if not self._holders[place]:
                del self._holders[place], self._pages[place]
                gone.append(place)
        return gone

    def _stored(self, pages: Sequence[worker_pb2.PageStored]) -> list[pb.KvCacheEvent]:
        events = []
        for row in rows(pages):
            tier = _TIERS.get(row[0].medium, 1)
            blocks = [
                pb.KvBlock(
                    block_hash=_signed(page.key),
                    token_ids=page.token_ids,
                    block_size=self._page_tokens,
                    cache_level=tier - 1,
                )
                for page in row
            ]
            stored = pb.KvBlocksStored(blocks=blocks, tier=tier, medium=row[0].medium)
            if row[0].parent:
                stored.parent_block_hash = _signed(row[0].parent)
            events.append(pb.KvCacheEvent(stored=stored))
        return events

    def _add(self, events: list[pb.KvCacheEvent]) -> None:
        self.last += 1
        for event in events:
            self._event_id += 1
            event.event_id = self._event_id
        batch = pb.KvEventBatch(sequence_number=self.last, timestamp=time.time(), events=events, dp_rank=0)
        self._kept.append(batch)
        self._kept_bytes += batch.ByteSize()
        while len(self._kept) > self._most_batches or self._kept_bytes > MOST_BYTES:
            self._kept_bytes -= self._kept.popleft().ByteSize()
        self._news.set()
        self._news = asyncio.Event()

    def _chunks(self, pages: list[worker_pb2.PageStored], last: int) -> Iterator[pb.KvEventBatch]:
        count = max(1, -(-len(pages) // CHUNK_PAGES))
        for index in range(count):
            events = self._stored(pages[index * CHUNK_PAGES : (index + 1) * CHUNK_PAGES])
            if index == 0:
                events.insert(0, pb.KvCacheEvent(cleared=pb.KvCacheCleared()))
            yield pb.KvEventBatch(
                sequence_number=last - count + 1 + index,
                timestamp=time.time(),
                events=events,
                dp_rank=0,
                snapshot=pb.KvSnapshotChunk(index=index, count=count, blocks=len(pages)),
            )


def _signed(key: int) -> int:
    """Returns the signed number of the same 64 bits, which the contract carries."""
    return key - 2**64 if key >= 2**63 else key


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("KV events are told no more on --worker-port: %r", error, exc_info=error)
