"""PageLog: what the prefix cache holds, and how that changes, for readers on other threads.

The cache writes; each reader gets a snapshot first and then the changes in their order. All readers share one list of
late changes: who falls behind it, or reads across a reset, gets another snapshot, so that no reader can make it grow.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_CHANGES = 65536
"""Changes that are kept for readers."""

CachedPage = tuple[bytes, bytes, bool, int]
"""The key of the page before it (b"": it is the first), its token ids (int32), whether it is in the host tier, and the
digest of its adapter (-1: none)."""


@dataclass(slots=True)
class Changes:
    """A part of what a reader gets. `is_new`: what it got before is void."""

    is_new: bool
    stored: list[tuple[bytes, CachedPage]]
    removed: list[bytes]


class PageNews(Protocol):
    """What a cache tells of its pages."""

    def describe(self, keys: Sequence[bytes], first: int, tokens: Sequence[int], adapter: int = -1) -> None:
        """See `PageLog.describe`."""

    def described(self) -> None:
        """See `PageLog.described`."""

    def store(self, key: bytes, is_host: bool) -> None:
        """See `PageLog.store`."""

    def remove(self, key: bytes) -> None:
        """See `PageLog.remove`."""

    def clear(self, weights_version: int) -> None:
        """See `PageLog.clear`."""


class PageLog:
    """The pages of one cache group that have a key: written by the thread that holds the scheduler, read by any."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.weights_version = 1
        self._lock = threading.Lock()
        self._pages: dict[bytes, CachedPage] = {}
        self._origins: dict[bytes, tuple[bytes, bytes, int]] = {}
        """What was described and is about to be stored."""
        self._changes: deque[tuple[bytes, CachedPage | None]] = deque()
        self._end = 0
        """The number of changes so far; `_changes` ends with it."""
        self._num_readers = 0

    def __len__(self) -> int:
        return len(self._pages)

    def describe(self, keys: Sequence[bytes], first: int, tokens: Sequence[int], adapter: int = -1) -> None:
        """`tokens` are those of the pages of `keys` from number `first` on, which are stored next; `adapter` is the
        slot of their request's."""
        data, width = array("i", tokens).tobytes(), 4 * self.page_size
        for place in range(first, len(keys)):
            if keys[place] not in self._pages:
                at = (place - first) * width
                self._origins[keys[place]] = keys[place - 1] if place else b"", data[at : at + width], adapter

    def described(self) -> None:
        """What was described has been stored, as far as it was to be."""
        self._origins.clear()

    def store(self, key: bytes, is_host: bool) -> None:
        """A request can begin with the page from now on; of a known page: it is in that tier now."""
        page = self._pages.get(key)
        if page is not None:
            if page[2] is is_host:
                return
            before, data, _, adapter = page
        else:
            before, data, adapter = self._origins.pop(key, (b"", b"", -1))
        self._write(key, (before, data, is_host, adapter))

    def remove(self, key: bytes) -> None:
        """No tier has the page any more."""
        if key in self._pages:
            self._write(key, None)

    def clear(self, weights_version: int) -> None:
        """Nothing is cached any more."""
        with self._lock:
            self.weights_version = weights_version
            self._pages.clear()
            self._origins.clear()
            self._changes.clear()
            self._end += MAX_CHANGES + 1  # whatever a reader has read is too old

    def open(self) -> PageReader:
        """A reader, to be closed."""
        with self._lock:
            self._num_readers += 1
        return PageReader(self)

    def close(self) -> None:
        """One reader has gone."""
        with self._lock:
            self._num_readers -= 1
            if not self._num_readers:
                self._changes.clear()

    def snapshot(self) -> tuple[list[tuple[bytes, CachedPage]], int]:
        """All pages, and the number of the change that comes next."""
        with self._lock:
            return list(self._pages.items()), self._end

    def since(self, position: int, most: int) -> list[tuple[bytes, CachedPage | None]] | None:
        """At most `most` changes from this number on; None: they are no longer known."""
        with self._lock:
            start = len(self._changes) - (self._end - position)
            return None if start < 0 else list(itertools.islice(self._changes, start, start + most))

    def _write(self, key: bytes, page: CachedPage | None) -> None:
        with self._lock:
            if page is None:
                del self._pages[key]
            else:
                self._pages[key] = page
            if self._num_readers:
                if len(self._changes) == MAX_CHANGES:
                    self._changes.popleft()
                self._changes.append((key, page))
                self._end += 1


class OwnerLog:
    """What one of several caches tells of its pages, for a log of all: a page is there as long as any of them has it,
    and in the host tier where no device has it."""

    def __init__(self, whole: PageLog, places: dict[bytes, dict[int, bool]], owner: int) -> None:
        """`places`, of all caches: by the key of a page those that have it, and whether in the host tier."""
        self._whole = whole
        self._places = places
        self._owner = owner

    def describe(self, keys: Sequence[bytes], first: int, tokens: Sequence[int], adapter: int = -1) -> None:
        """See `PageLog.describe`."""
        self._whole.describe(keys, first, tokens, adapter)

    def described(self) -> None:
        """See `PageLog.described`."""
        self._whole.described()

    def store(self, key: bytes, is_host: bool) -> None:
        """See `PageLog.store`."""
        self._places.setdefault(key, {})[self._owner] = is_host
        self._tell(key)

    def remove(self, key: bytes) -> None:
        """See `PageLog.remove`."""
        if key in self._places:
            self._places[key].pop(self._owner, None)
            self._tell(key)

    def clear(self, weights_version: int) -> None:
        """See `PageLog.clear`; all caches are cleared at once."""
        self._places.clear()
        self._whole.clear(weights_version)

    def _tell(self, key: bytes) -> None:
        if held := self._places[key]:
            self._whole.store(key, all(held.values()))
        else:
            del self._places[key]
            self._whole.remove(key)


class PageReader:
    """One reader's place in a log."""

    def __init__(self, log: PageLog) -> None:
        self.log = log
        self._position = -1
        self._snapshot: list[tuple[bytes, CachedPage]] = []
        """What is left of a snapshot, the first pages last."""

    def take(self, most: int) -> Changes | None:
        """What comes next, at most `most` pages; None: nothing is new."""
        late = None if self._position < 0 else self.log.since(self._position, 0 if self._snapshot else most)
        if late is None:
            pages, self._position = self.log.snapshot()
            self._snapshot = pages[::-1]
            return Changes(True, self._next(most), [])
        if self._snapshot:
            return Changes(False, self._next(most), [])
        if not late:
            return None
        self._position += len(late)
        last: dict[bytes, CachedPage | None] = {}
        for key, page in late:
            last.pop(key, None)
            last[key] = page
        stored = [(key, page) for key, page in last.items() if page is not None]
        return Changes(False, stored, [key for key, page in last.items() if page is None])

    def restart(self) -> None:
        """What comes next begins with all that is cached."""
        self._position = -1

    def close(self) -> None:
        """Must be called once."""
        self.log.close()

    def _next(self, most: int) -> list[tuple[bytes, CachedPage]]:
        part = self._snapshot[: -most - 1 : -1]
        del self._snapshot[-most:]
        return part
