"""Every rank's status, as one answer."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.protos import worker_pb2 as pb
from allspan.protos.engine import EngineStatistics, RankStatistics


def merged(statuses: Sequence[pb.WorkerStatus]) -> EngineStatistics:
    """The leader's counters, and an entry for each rank. `statuses` is in order of rank."""
    leader = statuses[0]
    counters = leader.statistics
    return EngineStatistics(
        model=leader.model,
        max_model_len=leader.max_model_len,
        running=counters.running,
        waiting=counters.waiting,
        pages_total=counters.pages_total,
        pages_used=counters.pages_used,
        page_size=counters.page_size,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        finished_requests=counters.finished_requests,
        preemptions=counters.preemptions,
        steps=counters.steps,
        host_s=counters.host_s,
        model_s=counters.model_s,
        ranks=tuple(_rank(status) for status in statuses),
    )


def _rank(status: pb.WorkerStatus) -> RankStatistics:
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
    )
