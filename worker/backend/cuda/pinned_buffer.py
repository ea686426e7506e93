"""PinnedBuffer: numbers that the host writes for each step and that one copy brings to the device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from allspan.worker.backend.cuda.event_wait import DEFAULT_WAITER, Event, EventWaiter
from allspan.worker.backend.cuda.streams import Stream

Ints = NDArray[np.int32]


class PinnedBuffer:
    """int32 numbers in host memory, pinned where there is a GPU, and their place on the device.

    There are two host buffers, so that one can be filled while the copy of the other is still to come. Only then is a
    copy waited for: nothing else waits for a step whose tokens are not read.
    """

    def __init__(
        self, capacity: int, device: torch.device, stream: Stream | None, waiter: EventWaiter = DEFAULT_WAITER
    ) -> None:
        """`stream`: where copies to the device are queued; None: they are done at once."""
        is_pinned = device.type == "cuda"
        self.hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=is_pinned) for _ in range(2)]
        self.device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._arrays: list[Ints] = [host.numpy() for host in self.hosts]
        self._turn = 0
        self._copied: list[Event | None] = [None, None]
        self._stream, self._waiter = stream, waiter

    def next(self) -> Ints:
        """The host buffer to write now. Raises DeadlineExceeded if what is there does not leave for the device in
        time."""
        self._turn ^= 1
        if (copied := self._copied[self._turn]) is not None:
            self._waiter.wait(copied)
        return self._arrays[self._turn]

    def send(self, spans: Iterable[tuple[int, int]]) -> None:
        """Copies what was written in these spans (first and last + 1 number) to the same places on the device."""
        host = self.hosts[self._turn]
        for first, last in spans:
            self.device[first:last].copy_(host[first:last], non_blocking=True)
        if self._stream is not None:
            self._copied[self._turn] = self._stream.record()
