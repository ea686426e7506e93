"""The readers of metrics: from the gateway's own counts, and from a view of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

from allspan.client.cluster.snapshot import ClusterView, RankView, ReplicaView
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.telemetry.histogram import Histogram
from allspan.protos.api.counters import STEP_TOKENS_BOUNDS
from allspan.protos.api.engine import EngineStatistics, RankStatistics
from allspan.protos.api.expert_load import ExpertLoad

Buckets = tuple[tuple[float, ...], tuple[int, ...], float]
"""Upper bounds, counts (one more, for what is above them) and the sum of all values."""
Mean = tuple[int, float]
"""The number of values, and their sum."""
Value = float | Buckets | Mean


@dataclass(frozen=True, slots=True)
class Scene:
    """The data of one scrape."""

    context: GatewayContext
    view: ClusterView


Read = Callable[[Scene], Iterable[tuple[tuple[str, ...], Value]]]
"""Values, each with those of the row's labels."""


def one(value: Callable[[Scene], float]) -> Read:
    return lambda scene: [((), value(scene))]


def measured(name: str) -> Read:
    """A histogram of the gateway's own."""

    def read(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
        histogram: Histogram = getattr(scene.context.telemetry.histograms, name)
        yield (), (histogram.bounds, tuple(histogram.counts), histogram.total)

    return read


def counted(name: str) -> Read:
    """A Counter of the gateway's own, by its keys."""

    def read(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
        for key, count in sorted(getattr(scene.context.telemetry, name).items()):
            yield tuple(map(str, key)) if isinstance(key, tuple) else (key,), count

    return read


def replicas(value: Callable[[ReplicaView], float]) -> Read:
    return lambda scene: [((str(replica.index),), value(replica)) for replica in scene.view.replicas]


def engines(value: Callable[[EngineStatistics], Value]) -> Read:
    """Returns a reader of a value of each replica that answered."""

    def read(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
        for replica in scene.view.replicas:
            if replica.statistics is not None:
                yield (str(replica.index),), value(replica.statistics)

    return read


def counter(name: str) -> Read:
    """An engine's counter as it is, of the replicas that answered."""
    return engines(lambda told: cast(float, getattr(told, name)))


def ranks(value: Callable[[RankView], Value | None]) -> Read:
    """Returns a reader of a value of each rank that has one."""

    def read(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
        for replica in scene.view.replicas:
            for rank in replica.ranks:
                if (known := value(rank)) is not None:
                    yield (str(replica.index), str(rank.rank)), known

    return read


def _told(value: Callable[[RankStatistics], Value], rank: RankView) -> Value | None:
    return None if rank.statistics is None else value(rank.statistics)


def rank_counters(value: Callable[[RankStatistics], Value]) -> Read:
    """Returns a reader of a value of each rank that answered."""
    return ranks(partial(_told, value))


def rank_info(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
    for replica in scene.view.replicas:
        for rank in replica.ranks:
            if (told := rank.statistics) is not None:
                where = (rank.host, told.numa_nodes, told.device, told.kernels, str(told.threads))
                yield (str(replica.index), str(rank.rank), *where), 1


def cache_config(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
    for replica in scene.view.replicas:
        if (told := replica.statistics) is not None:
            sizes = (told.page_size, told.pages_total, told.host_pages_total, told.kv_bytes)
            yield (str(replica.index), *map(str, sizes)), 1


def pages(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
    for replica in scene.view.replicas:
        if (told := replica.statistics) is not None:
            for state in ("used", "cached", "free"):
                yield (str(replica.index), state), getattr(told, f"pages_{state}")


def accepted_drafts(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
    for replica in scene.view.replicas:
        if (told := replica.statistics) is not None:
            for position, count in enumerate(told.accepted_per_position):
                yield (str(replica.index), str(position)), count


def usage(used: int, total: int) -> float:
    return used / total if total else 0.0


def experts(value: Callable[[ExpertLoad], float]) -> Read:
    """Returns a reader of a value of each layer with experts. Experts have no labels of their own: there may be
    tens of thousands of them."""

    def read(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
        for replica in scene.view.replicas:
            for load in replica.statistics.experts if replica.statistics is not None else ():
                yield (str(replica.index), str(load.layer)), value(load)

    return read


def step_tokens(told: EngineStatistics) -> Value:
    counts = tuple(told.step_tokens) or (0,) * (len(STEP_TOKENS_BOUNDS) + 1)
    return STEP_TOKENS_BOUNDS, counts, told.step_tokens_sum
