"""HostPages: the host tier of a GPU's pages. Copies go on beside the steps, which wait for no more than they read.

The pages of one copy are gathered into a buffer on the device, by a kernel between two steps: from then on others may
have them. From there they go to host memory on a stream of their own; and the other way round they come to a buffer on
a third stream, and a kernel puts them into their places, for which the next step waits, but not the host.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.cuda.cache.move_pages import MOST_PAGES, gather_pages, scatter_pages
from allspan.protos.api.errors import ConfigError, InternalError
from allspan.worker.backend.cuda.event_wait import DEFAULT_WAITER, Event, EventWaiter
from allspan.worker.backend.cuda.streams import Streams
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.page_pool import Copy
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.process.release_memory import anonymous

MovePages = Callable[[Tensor, Sequence[int], Tensor, int], None]

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20
"""The bytes of a buffer on the device; each way has two, so that one can be filled while the other is emptied."""


@dataclass(slots=True)
class _Buffer:
    pages: Tensor
    """uint8 [pages, bytes of one] on the device."""
    done: Event | None = None
    """Marks the end of the last copy that used it."""


class _Ring:
    """Buffers in turn."""

    def __init__(self, count: int, page_bytes: int, device: str) -> None:
        made = (torch.empty((count, page_bytes), dtype=torch.uint8, device=device) for _ in range(2))
        self._buffers = deque(_Buffer(pages) for pages in made)

    def next(self) -> _Buffer:
        self._buffers.rotate()
        return self._buffers[0]


class HostPages:
    """Pages of host memory, each with all its layers in one stretch, and the copies to and from a device's."""

    def __init__(
        self,
        spec: CacheSpec,
        num_pages: int,
        device: str,
        streams: Streams,
        chunk_bytes: int = CHUNK_BYTES,
        waiter: EventWaiter = DEFAULT_WAITER,
    ) -> None:
        """The memory is not taken from others before it is written; see `pin`. Raises ConfigError when it cannot be
        had."""
        self.num_pages = num_pages
        self._streams = streams
        self._waiter = waiter
        page = spec.bytes_per_page
        try:
            self.memory = anonymous(num_pages * page).view(num_pages, page)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"host_kv_cache_bytes: {num_pages} pages of {page} bytes cannot be had: {error}"
            ) from error
        self._chunk = max(1, min(MOST_PAGES, chunk_bytes // page, num_pages))
        self._down, self._up = _Ring(self._chunk, page, device), _Ring(self._chunk, page, device)
        self._saving: deque[tuple[Event, frozenset[int]]] = deque()
        """Saves that may still be on their way, and the host pages that they write."""

    def pin(self) -> None:
        """Takes the memory and keeps it where it is: else the GPU's copies would wait for the host's. Raises
        ConfigError."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address, size = self.memory.data_ptr(), self.memory.nbytes
        if failed := int(runtime.cudaHostRegister(address, size, 0)):
            raise ConfigError(
                f"host_kv_cache_bytes: {size} bytes cannot be pinned (CUDA error {failed}): set it lower, or raise the "
                "container's limit"
            )
        weakref.finalize(self, runtime.cudaHostUnregister, address)
        logger.info("host tier: %d pages, %.2f GiB of pinned memory", self.num_pages, size / 2**30)

    def save(self, device: KVCache, copies: Sequence[Copy]) -> None:
        """device → host, in this order; returns at once. Steps that are launched from now on may have the pages."""
        steps, saves = self._streams.steps, self._streams.saves
        self._forget()
        for chunk in self._chunks(device, [(copy.source, copy.target) for copy in copies]):
            sources, targets = zip(*chunk, strict=True)
            buffer = self._down.next()
            if buffer.done is not None:
                steps.wait(buffer.done)
            steps.run(partial(_move, gather_pages, device, sources, buffer))
            saves.wait(steps.record())  # and so for all loads before, which have read what is written now
            saves.run(partial(self._copy, targets, buffer, is_save=True))
            buffer.done = saves.record()
            self._saving.append((buffer.done, frozenset(targets)))

    def load(self, device: KVCache, copies: Sequence[Copy]) -> None:
        """host → device, in this order; returns at once. Steps that are launched from now on find the pages."""
        steps, loads = self._streams.steps, self._streams.loads
        self._forget()
        for chunk in self._chunks(device, [(copy.target, copy.source) for copy in copies]):
            targets, sources = zip(*chunk, strict=True)
            buffer = self._up.next()
            if buffer.done is not None:
                loads.wait(buffer.done)
            if (saved := self._saved(frozenset(sources))) is not None:
                loads.wait(saved)
            loads.run(partial(self._copy, sources, buffer, is_save=False))
            steps.wait(loads.record())
            steps.run(partial(_move, scatter_pages, device, targets, buffer))
            buffer.done = steps.record()

    @property
    def tensors(self) -> list[Tensor]:
        """None: pinned memory stays where it is."""
        return []

    def drain(self) -> None:
        """Waits for all copies. Raises DeadlineExceeded."""
        self._waiter.wait(self._streams.saves.record())
        self._waiter.wait(self._streams.loads.record())

    def _chunks(self, device: KVCache, pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """(device's page, host's page), as many at a time as a buffer holds, and none of the device's twice in one."""
        chunk: list[tuple[int, int]] = []
        seen: set[int] = set()
        for ours, theirs in pairs:
            if not (0 <= ours < device.num_pages and 0 <= theirs < self.num_pages):
                raise InternalError(
                    f"page {ours} of {device.num_pages} and page {theirs} of {self.num_pages} on the host: no such copy"
                )
            if len(chunk) == self._chunk or ours in seen:
                yield chunk
                chunk, seen = [], set()
            chunk.append((ours, theirs))
            seen.add(ours)
        if chunk:
            yield chunk

    def _copy(self, pages: Sequence[int], buffer: _Buffer, is_save: bool) -> None:
        """Between host pages and the buffer's first; those that follow each other at once."""
        begin = 0
        for end in range(1, len(pages) + 1):
            if end == len(pages) or pages[end] != pages[end - 1] + 1:
                host = self.memory[pages[begin] : pages[begin] + end - begin]
                part = buffer.pages[begin:end]
                (host if is_save else part).copy_(part if is_save else host, non_blocking=True)
                begin = end

    def _saved(self, pages: frozenset[int]) -> Event | None:
        """What a load of these host pages must wait for."""
        return next((event for event, written in reversed(self._saving) if written & pages), None)

    def _forget(self) -> None:
        while self._saving and self._saving[0][0].query():
            self._saving.popleft()


def _move(
    kernel: Callable[[Tensor, Sequence[int], Tensor, int], None], device: KVCache, pages: Sequence[int], buffer: _Buffer
) -> None:
    first = 0
    for part in device.parts:
        kernel(part, pages, buffer.pages, first)
        first += part.nbytes // device.num_pages
