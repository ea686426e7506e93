"""The LoRA adapters of a cluster as its client knows them; a new world gets them before it takes requests."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Protocol

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import NO_ADAPTER, AdapterModule
from allspan.protos.api.errors import AllspanError, DeadlineExceeded, Unavailable
from allspan.protos.convert import adapter_from_wire

BRING_S = 120.0
"""Seconds for a new world to load one adapter that the one before had."""
MOST_UNLOADED = 4096
"""Unloaded adapters that are remembered; the oldest are forgotten first."""

logger = logging.getLogger(__name__)


class AdapterWorld(Protocol):
    """A connected world."""

    async def load_adapter(self, adapter: AdapterModule, timeout: float) -> None: ...
    async def unload_adapter(self, name: str, timeout: float) -> int: ...


class ClusterAdapters:
    """What the leaders of all replicas have told, kept while worlds end and others begin."""

    def __init__(self) -> None:
        self._known: dict[int, AdapterModule] = {}
        self._unloaded: dict[int, None] = {}
        self._replicas: list[ReplicaAdapters] = []

    def of_replica(self) -> ReplicaAdapters:
        """Returns the record of one more replica."""
        self._replicas.append(ReplicaAdapters(self))
        return self._replicas[-1]

    def listed(self) -> tuple[AdapterModule, ...]:
        """Returns the adapters that requests may name, in the order in which they were loaded."""
        return tuple(self._known.values())

    def change(self, before: Mapping[int, AdapterModule], now: Mapping[int, AdapterModule]) -> None:
        """A world that had some adapters has others now."""
        for digest in before.keys() - now.keys():
            self._known.pop(digest, None)
            self._unloaded[digest] = None
        for digest in list(islice(self._unloaded, max(0, len(self._unloaded) - MOST_UNLOADED))):
            del self._unloaded[digest]
        for digest, adapter in now.items():
            if digest not in self._unloaded:
                self._known.setdefault(digest, adapter)

    def missing(self, there: Collection[int]) -> list[AdapterModule]:
        """Returns those that a world with these lacks."""
        return [adapter for digest, adapter in self._known.items() if digest not in there]

    def has(self, digest: int) -> bool:
        """Whether worlds to come will load it."""
        return digest in self._known

    def is_unloaded(self, digest: int) -> bool:
        return digest in self._unloaded

    def forget(self, digest: int) -> None:
        """It is lost, unless another replica has it."""
        if not any(replica.has(digest) for replica in self._replicas):
            self._known.pop(digest, None)


class ReplicaAdapters:
    """What the leader of one replica's world has told of its adapters."""

    def __init__(self, cluster: ClusterAdapters) -> None:
        self._cluster = cluster
        self._told: dict[int, AdapterModule] = {}
        self._version = -1

    def has(self, digest: int) -> bool:
        """Whether a request with this adapter, or with none, may go there."""
        return digest == NO_ADAPTER or digest in self._told

    def hear(self, message: pb.AdapterList) -> None:
        """Takes in what the leader tells; what is older than the last word is passed over."""
        if message.version > self._version:
            now = {each.digest: adapter_from_wire(each) for each in message.adapters}
            self._cluster.change(self._told, now)
            self._told, self._version = now, message.version

    def forget(self) -> None:
        """Its world is over. What that had stays known."""
        self._told, self._version = {}, -1

    async def bring(self, world: AdapterWorld) -> None:
        """Has a new world, which has told its adapters, load those of the cluster that it lacks, and unload those that
        it was started with and that were unloaded since, also while this runs. One that can be loaded no more is given
        up. Raises Unavailable, DeadlineExceeded."""
        given_up: set[int] = set()
        while True:
            over = [each for each in self._told.values() if self._cluster.is_unloaded(each.digest)]
            missing = self._cluster.missing(self._told.keys() | given_up)
            if over:
                await world.unload_adapter(over[0].name, BRING_S)
            elif not missing:
                return
            elif not await self._load(world, missing[0]):
                given_up.add(missing[0].digest)

    async def _load(self, world: AdapterWorld, adapter: AdapterModule) -> bool:
        """Whether a new world has loaded it. Raises Unavailable, DeadlineExceeded."""
        try:
            await world.load_adapter(adapter, BRING_S)
        except (Unavailable, DeadlineExceeded):
            raise
        except AllspanError as error:
            logger.warning("a new world goes without an adapter of the one before: %s", error.message)
            self._cluster.forget(adapter.digest)
            return False
        logger.info("the adapter %r is loaded again", adapter.name)
        return True
