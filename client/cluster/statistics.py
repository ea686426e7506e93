"""Every rank's status, as one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.engine import EngineStatistics, RankStatistics

_COUNTERS = tuple(
    field.name for field in fields(EngineStatistics) if field.name in pb.Statistics.DESCRIPTOR.fields_by_name
)
_NOT_ADDED = ("page_size", "weights_version", "weights_loaded", "step_tokens")


def merged(statuses: Sequence[pb.WorkerStatus], replica: int = 0) -> EngineStatistics:
    """One world: the leader's counters, and an entry for each rank. `statuses` is in order of rank."""
    leader, *followers = statuses
    told = {name: getattr(leader.statistics, name) for name in _COUNTERS}
    told["step_tokens"] = tuple(told["step_tokens"])
    # A follower's inbox may be full before the leader's queue is. Several refuse much the same requests.
    told["refused_requests"] += max((follower.statistics.refused_requests for follower in followers), default=0)
    return EngineStatistics(
        model=leader.model,
        max_model_len=leader.max_model_len,
        ranks=tuple(rank_statistics(status, replica) for status in statuses),
        **told,
    )


def added(worlds: Sequence[EngineStatistics], replicas: int) -> EngineStatistics:
    """The sums over the worlds that answered, of `replicas` that there are; at least one. The weights count as loaded
    when all worlds have them, in the oldest version."""
    first = worlds[0]
    sums: dict[str, Any] = {
        name: sum(getattr(world, name) for world in worlds) for name in _COUNTERS if name not in _NOT_ADDED
    }
    return EngineStatistics(
        model=first.model,
        max_model_len=first.max_model_len,
        page_size=first.page_size,
        weights_version=min(world.weights_version for world in worlds),
        weights_loaded=all(world.weights_loaded for world in worlds),
        ranks=tuple(rank for world in worlds for rank in world.ranks),
        replicas=replicas,
        replicas_ready=len(worlds),
        step_tokens=tuple(map(sum, zip(*(world.step_tokens for world in worlds), strict=False))),
        **sums,
    )


def rank_statistics(status: pb.WorkerStatus, replica: int) -> RankStatistics:
    """One rank's own."""
    counters = status.statistics
    return RankStatistics(
        rank=status.rank,
        pid=status.pid,
        host=status.host,
        state=status.state,
        progress=status.progress,
        progress_age_s=status.progress_age_s,
        peak_rss_bytes=counters.peak_rss_bytes,
        weight_bytes=counters.weight_bytes,
        kv_bytes=counters.kv_bytes,
        load_s=counters.load_s,
        kernels=status.kernels,
        replica=replica,
        device=status.device,
        numa_nodes=status.numa_nodes,
        threads=status.threads,
        rss_bytes=counters.rss_bytes,
        steps=counters.steps,
        host_s=counters.host_s,
        model_s=counters.model_s,
    )
