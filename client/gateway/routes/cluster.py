"""GET /cluster: the live cluster as one JSON object. docs/metrics.md has its shape."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from starlette.responses import JSONResponse, Response

from allspan import __version__
from allspan.client.cluster.snapshot import ClusterView, RankView, ReplicaView
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Endpoint
from allspan.protos.api.counters import COUNTERS
from allspan.protos.api.engine import EngineStatistics
from allspan.protos.api.expert_load import ExpertLoad

_TOTALS = tuple(name for name, declared in COUNTERS.items() if declared["is_total"])
_OF_A_RANK = (
    "device",
    "numa_nodes",
    "kernels",
    "threads",
    "state",
    "progress_age_s",
    "rss_bytes",
    "peak_rss_bytes",
    "weight_bytes",
    "kv_bytes",
    "load_s",
    "steps",
)


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoint of the cluster's state."""

    async def cluster() -> Response:
        return JSONResponse(described(context, await context.snapshots.look()))

    return [Endpoint("GET", "/cluster", cluster, "Describes the live cluster.")]


def described(context: GatewayContext, view: ClusterView) -> dict[str, Any]:
    """Returns all that is known; fields that only a rank can answer are missing when none does."""
    counted = view.statistics
    return {
        "model": context.model.name,
        "max_model_len": context.model.max_model_len,
        "version": __version__,
        "ready": context.admission.is_ready,
        "cause": context.admission.down_cause,
        "uptime_s": round(time.monotonic() - context.telemetry.started, 3),
        "replicas": {"total": len(view.replicas), "ready": view.num_ready},
        "ranks": [_rank(replica, rank) for replica in view.replicas for rank in replica.ranks],
        **(_counted(counted) if counted is not None else {}),
    }


def _counted(counted: EngineStatistics) -> dict[str, Any]:
    return {
        "running": counted.running,
        "waiting": counted.waiting,
        "weights_loaded": counted.weights_loaded,
        "kv": {
            "pages_total": counted.pages_total,
            "pages_used": counted.pages_used,
            "pages_cached": counted.pages_cached,
            "usage": round(counted.kv_usage, 4),
            "free_tokens": counted.free_tokens,
            "page_size": counted.page_size,
            "bytes": counted.kv_bytes,
            "host_pages_total": counted.host_pages_total,
            "host_pages_used": counted.host_pages_used,
        },
        "prefix": {"queries": counted.prefix_query_tokens, "hits": counted.prefix_hit_tokens},
        "tokens_per_s": {
            "prompt": round(counted.prompt_tokens_per_s, 1),
            "generation": round(counted.generated_tokens_per_s, 1),
        },
        "totals": {name: getattr(counted, name) for name in _TOTALS},
        **({"experts": [_experts(load) for load in counted.experts]} if counted.experts else {}),
    }


def _experts(load: ExpertLoad) -> dict[str, Any]:
    return {
        "layer": load.layer,
        "imbalance": round(load.imbalance, 4),
        "hottest": load.hottest,
        "hottest_share": round(load.hottest_share, 4),
        "tokens": load.tokens,
    }


def _rank(replica: ReplicaView, rank: RankView) -> dict[str, Any]:
    known: dict[str, Any] = {
        "replica": replica.index,
        "rank": rank.rank,
        "epoch": replica.epoch,
        "host": rank.host,
        "pid": rank.pid,
        "state": "silent" if rank.heard_s is not None else "gone",
    }
    if rank.heard_s is not None:
        known["heard_s"] = round(rank.heard_s, 3)
    if rank.statistics is not None:
        told = asdict(rank.statistics)
        known |= {name: told[name] for name in _OF_A_RANK}
        nodes = told["numa_nodes"]
        known["where"] = told["device"] or (f"NUMA node {nodes}" if nodes else "CPU")
    return known
