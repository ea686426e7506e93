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
    """The pages of a device and their second tier, by cache group."""

    def __init__(self, device: Sequence[KVCache], host: Sequence[HostPages]) -> None:
        """One of each for every cache group; all groups have equally many host pages."""
        self._groups = tuple(zip(device, host, strict=True))
        self.num_host_pages = host[0].num_pages

    def copy(self, saves: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Copies device → host, then host → device, each in its order, as seen by steps that are launched later."""
        for group, (device, host) in enumerate(self._groups):
            if own := _of_group(saves, group, len(self._groups)):
                host.save(device, own)
            if own := _of_group(loads, group, len(self._groups)):
                host.load(device, own)


def _of_group(copies: Sequence[Copy], group: int, num_groups: int) -> Sequence[Copy]:
    return copies if num_groups == 1 else [copy for copy in copies if copy.group == group]
