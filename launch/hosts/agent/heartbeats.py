"""Heartbeats in both directions between an agent and its client, each sent from a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

INTERVAL_S = 0.2
STALLED_S = 1.0
"""A pause between two looks from which on this process itself did not run, so that it may not blame the other."""


class Liveness:
    """When the other end was last heard of."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard = self._looked = clock()

    def heard(self) -> None:
        self._heard = self._clock()

    def is_silent(self, limit_s: float) -> bool:
        """Returns whether nothing was heard for `limit_s` seconds in which this process ran; to be asked often."""
        now = self._clock()
        if now - self._looked > STALLED_S:
            self._heard = now
        self._looked = now
        return now - self._heard > limit_s


def ticks(ended: threading.Event) -> Iterator[None]:
    """Yields five times a second until `ended` is set."""
    while not ended.is_set():
        yield
        ended.wait(INTERVAL_S)
