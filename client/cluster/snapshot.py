"""A cluster as its facade sees it now, whether all of it is up and answers or not."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.client.cluster.statistics import added
from allspan.protos.api.engine import EngineStatistics, RankStatistics


@dataclass(frozen=True, slots=True)
class RankView:
    """A snapshot of one rank. `statistics` is None when it did not answer."""

    rank: int
    pid: int
    host: str
    heard_s: float | None = None
    """Seconds since its last heartbeat; None when its world is gone."""
    statistics: RankStatistics | None = None


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A snapshot of one replica. `statistics` is None unless all of its ranks answered."""

    index: int
    epoch: int
    """The epoch of its world, one more with every restart."""
    cause: str
    """The reason why it takes no requests, "" while it does."""
    ranks: tuple[RankView, ...] = ()
    statistics: EngineStatistics | None = None


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A snapshot of all replicas."""

    replicas: tuple[ReplicaView, ...] = ()

    @property
    def statistics(self) -> EngineStatistics | None:
        """The sums over the replicas that answered, None without any."""
        answered = [replica.statistics for replica in self.replicas if replica.statistics is not None]
        return added(answered, len(self.replicas)) if answered else None

    @property
    def num_ready(self) -> int:
        return sum(not replica.cause for replica in self.replicas)
