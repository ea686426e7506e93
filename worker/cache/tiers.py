"""Tiers: one rank's pages on the device and those in host memory, and the copies between them that a plan names."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.worker.cache.kv import KVCache
from allspan.worker.scheduler.plan import Copy


class Tiers:
    """`host` is a cache of the same spec in host memory."""

    def __init__(self, device: KVCache, host: KVCache) -> None:
        self._device = device
        self._host = host
        self.num_host_pages = host.num_pages

    def copy(self, saves: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Device → host, then host → device, each in its order."""
        if saves:
            self._host.copy_pages(self._device, saves)
        if loads:
            self._device.copy_pages(self._host, loads)
