"""Tiers: one rank's pages on the device and those in host memory, and the copies between them that a plan names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.page_pool import Copy


class HostPages(Protocol):
    """Pages in host memory, the second tier of a device's."""

    num_pages: int

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors whose memory may be given back while no step runs."""

    def save(self, device: KVCache, copies: Sequence[Copy]) -> None:
        """Copies device → host in this order, as seen by steps that are launched later."""

    def load(self, device: KVCache, copies: Sequence[Copy]) -> None:
        """Copies host → device in this order, as seen by steps that are launched later."""

    def drain(self) -> None:
        """Waits until no copy is on its way. Raises DeadlineExceeded."""


class PlainHostPages:
    """A cache of the same spec in host memory; copies are made at once."""

    def __init__(self, pages: KVCache) -> None:
        self._pages = pages
        self.num_pages = pages.num_pages

    @property
    def tensors(self) -> list[Tensor]:
        return [*self._pages.keys, *self._pages.values]

    def save(self, device: KVCache, copies: Sequence[Copy]) -> None:
        self._pages.copy_pages(device, copies)

    def load(self, device: KVCache, copies: Sequence[Copy]) -> None:
        device.copy_pages(self._pages, copies)

    def drain(self) -> None:
        pass


class Tiers:
    """The pages of a device and their second tier."""

    def __init__(self, device: KVCache, host: HostPages) -> None:
        self._device = device
        self._host = host
        self.num_host_pages = host.num_pages

    def copy(self, saves: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Device → host, then host → device, each in its order, as seen by steps that are launched later."""
        if saves:
            self._host.save(self._device, saves)
        if loads:
            self._host.load(self._device, loads)
