"""Tiers: one rank's pages on the device and those in host memory, and the copies between them that a plan names."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.worker.backend.cuda.host_pages import HostPages
from allspan.worker.cache.kv import KVCache
from allspan.worker.scheduler.plan import Copy


class Tiers:
    """`host` is a cache of the same spec in host memory, or the host tier of a GPU."""

    def __init__(self, device: KVCache, host: KVCache | HostPages) -> None:
        self._device = device
        self._host = host
        self.num_host_pages = host.num_pages

    def copy(self, saves: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Device → host, then host → device, each in its order, as seen by steps that are launched later."""
        if isinstance(self._host, HostPages):
            if saves:
                self._host.save(self._device, saves)
            if loads:
                self._host.load(self._device, loads)
            return
        if saves:
            self._host.copy_pages(self._device, saves)
        if loads:
            self._device.copy_pages(self._host, loads)
