"""Merges the ranks' statuses into the statistics of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.counters import EngineCounters, combined, counters_of
from allspan.protos.api.engine import EngineStatistics, RankStatistics
from allspan.protos.api.expert_load import ExpertLoad
from allspan.protos.api.expert_load import added as added_experts
from allspan.protos.convert import counters_from_wire


def merged(statuses: Sequence[pb.WorkerStatus], replica: int = 0) -> EngineStatistics:
    """Returns the statistics of one world: the leader's counters, and an entry for each rank. `statuses` is in order of
    rank."""
    counters = [counters_from_wire(status.statistics.counters) for status in statuses]
    leader, *followers = counters
    # A follower's inbox may be full before the leader's queue is. Several refuse much the same requests.
    leader.refused_requests += max((follower.refused_requests for follower in followers), default=0)
    return EngineStatistics(
        statuses[0].model,
        statuses[0].max_model_len,
        tuple(map(_rank_statistics, statuses, counters, (replica,) * len(statuses))),
        experts=_experts(statuses),
        **counters_of(leader),
    )


def added(worlds: Sequence[EngineStatistics], replicas: int) -> EngineStatistics:
    """The counters over the worlds that answered, of `replicas` that there are; at least one."""
    return EngineStatistics(
        worlds[0].model,
        worlds[0].max_model_len,
        tuple(rank for world in worlds for rank in world.ranks),
        replicas,
        replicas_ready=len(worlds),
        experts=added_experts(load for world in worlds for load in world.experts),
        **combined(worlds),
    )


def _experts(statuses: Iterable[pb.WorkerStatus]) -> tuple[ExpertLoad, ...]:
    told = (load for status in statuses for load in status.experts)
    return added_experts(ExpertLoad(load.layer, tuple(load.tokens), tuple(load.groups)) for load in told)


def rank_statistics(status: pb.WorkerStatus, replica: int) -> RankStatistics:
    """Returns one rank's own statistics."""
    return _rank_statistics(status, counters_from_wire(status.statistics.counters), replica)


def _rank_statistics(status: pb.WorkerStatus, counters: EngineCounters, replica: int) -> RankStatistics:
    process = status.statistics
    return RankStatistics(
        rank=status.rank,
        pid=status.pid,
        host=status.host,
        state=status.state,
        progress=status.progress,
        progress_age_s=status.progress_age_s,
        peak_rss_bytes=process.peak_rss_bytes,
        weight_bytes=process.weight_bytes,
        kv_bytes=process.kv_bytes,
        load_s=process.load_s,
        kernels=status.kernels,
        replica=replica,
        device=status.device,
        numa_nodes=status.numa_nodes,
        threads=status.threads,
        rss_bytes=process.rss_bytes,
        steps=counters.steps,
        host_s=counters.host_s,
        model_s=counters.model_s,
    )
