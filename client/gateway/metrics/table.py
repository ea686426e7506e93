"""The metrics of /metrics: a row a metric, each with its reader. docs/metrics.md has the same rows; a test compares.

Names are those that vLLM's users know, with our prefix; and with vLLM's full names in `vllm_names`.
"""

from __future__ import annotations

from dataclasses import dataclass

from allspan import __version__
from allspan.client.gateway.metrics import collect as read
from allspan.client.gateway.metrics.collect import Read
from allspan.protos.api.counters import COUNTERS

PREFIX = "allspan:"
MODEL = "model_name"
"""A label of every metric."""


@dataclass(frozen=True, slots=True)
class Metric:
    """`kind`: "gauge", "counter" (its name ends in _total), "histogram", "summary" (a count and a sum), "info"."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    read: Read


_REPLICA = ("replica",)
_RANK = ("replica", "rank")
_LAYER = ("replica", "layer")

_COUNTERS = tuple(
    Metric(row.name, "counter" if row.name.endswith("_total") else "gauge", row.help, _REPLICA, read.counter(name))
    for name, declared in COUNTERS.items()
    if (row := declared["metric"]) is not None
)
"""The engine's counters that are metrics as they are."""

METRICS = (
    # Requests, as the gateway measures them.
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "From a request's arrival, before tokenisation, to its first token.",
        (),
        read.measured("first_token_s"),
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "Between a request's tokens, one observation a token after the first.",
        (),
        read.measured("inter_token_s"),
    ),
    Metric(
        "time_per_output_token_seconds",
        "histogram",
        "A request's mean time between its tokens.",
        (),
        read.measured("mean_token_s"),
    ),
    Metric(
        "e2e_request_latency_seconds", "histogram", "From a request's arrival to its end.", (), read.measured("total_s")
    ),
    Metric(
        "request_queue_time_seconds",
        "histogram",
        "From the leader's taking a request in to its first step.",
        (),
        read.measured("queue_s"),
    ),
    Metric(
        "request_prefill_time_seconds",
        "histogram",
        "From a request's first step to its first token, on the leader.",
        (),
        read.measured("prefill_s"),
    ),
    Metric(
        "request_decode_time_seconds",
        "histogram",
        "From a request's first token to its last.",
        (),
        read.measured("decode_s"),
    ),
    Metric(
        "request_prompt_tokens", "histogram", "Prompt tokens of a request.", (), read.measured("request_prompt_tokens")
    ),
    Metric(
        "request_generation_tokens",
        "histogram",
        "Output tokens of a request.",
        (),
        read.measured("request_output_tokens"),
    ),
    Metric(
        "prompt_tokens_total",
        "counter",
        "Prompt tokens of requests that have had their first token.",
        (),
        read.one(lambda scene: scene.context.telemetry.prompt_tokens),
    ),
    Metric(
        "generation_tokens_total",
        "counter",
        "Output tokens.",
        (),
        read.one(lambda scene: scene.context.telemetry.output_tokens),
    ),
    Metric(
        "request_success_total", "counter", "Requests that finished.", ("finished_reason",), read.counted("finished")
    ),
    Metric(
        "request_failure_total",
        "counter",
        "Requests that were refused, cancelled or failed.",
        ("reason",),
        read.counted("failed"),
    ),
    Metric(
        "http_requests_total",
        "counter",
        "HTTP answers begun.",
        ("method", "handler", "status"),
        read.counted("answers"),
    ),
    Metric("grpc_requests_total", "counter", "gRPC calls ended.", ("method", "status"), read.counted("grpc_calls")),
    Metric(
        "gateway_requests",
        "gauge",
        "Requests inside the gateway now, each choice counted.",
        (),
        read.one(lambda scene: scene.context.admission.num_open),
    ),
    Metric(
        "gateway_requests_limit",
        "gauge",
        "Most requests inside the gateway; one more is refused.",
        (),
        read.one(lambda scene: scene.context.admission.most_open),
    ),
    Metric(
        "ready",
        "gauge",
        "1 while new requests are welcome, as /ready says.",
        (),
        read.one(lambda scene: scene.context.admission.is_ready),
    ),
    Metric("build_info", "info", "The version of allspan.", ("version",), lambda scene: [((__version__,), 1)]),
    # Replicas, as their leaders count.
    *_COUNTERS,
    Metric(
        "replica_up",
        "gauge",
        "1 while the replica lets requests in.",
        _REPLICA,
        read.replicas(lambda replica: not replica.cause),
    ),
    Metric(
        "engine_generation_id",
        "gauge",
        "The epoch of the replica's world, one more with each restart.",
        _REPLICA,
        read.replicas(lambda replica: replica.epoch),
    ),
    Metric(
        "kv_cache_usage_perc",
        "gauge",
        "KV pages in use, from 0 to 1, of the fullest cache group; those kept for prefix hits do not count.",
        _REPLICA,
        read.engines(lambda told: told.kv_usage),
    ),
    Metric(
        "host_kv_cache_usage_perc",
        "gauge",
        "Pages of the host tier that hold something, from 0 to 1.",
        _REPLICA,
        read.engines(lambda told: read.usage(told.host_pages_used, told.host_pages_total)),
    ),
    Metric(
        "kv_cache_pages",
        "gauge",
        "KV pages by state: used, cached (for prefix hits), free.",
        ("replica", "state"),
        read.pages,
    ),
    Metric(
        "cache_config_info",
        "info",
        "Sizes of the KV cache.",
        ("replica", "page_size", "num_pages", "num_host_pages", "bytes"),
        read.cache_config,
    ),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Drafts that were kept, by their position in their run.",
        ("replica", "position"),
        read.accepted_drafts,
    ),
    Metric(
        "iteration_tokens_total",
        "histogram",
        "Tokens computed in a step, of prompts and outputs.",
        _REPLICA,
        read.engines(read.step_tokens),
    ),
    Metric(
        "scheduler_step_overhead_seconds",
        "summary",
        "Of a step, the leader's time outside the model's forward pass.",
        _REPLICA,
        read.engines(lambda told: (told.steps, told.host_s)),
    ),
    # Layers of mixtures of experts.
    Metric(
        "expert_choices_total",
        "counter",
        "Choices of experts by the tokens of a layer, over all experts.",
        _LAYER,
        read.experts(lambda load: load.choices),
    ),
    Metric(
        "expert_imbalance",
        "gauge",
        "Tokens of the busiest group of ranks that hold the same experts, over the mean group's.",
        _LAYER,
        read.experts(lambda load: load.imbalance),
    ),
    Metric(
        "expert_hottest_share",
        "gauge",
        "Share of a layer's choices that went to the expert with most, from 0 to 1.",
        _LAYER,
        read.experts(lambda load: load.hottest_share),
    ),
    # Ranks.
    Metric(
        "rank_heartbeat_age_seconds",
        "gauge",
        "Since the gateway last heard of the rank.",
        _RANK,
        read.ranks(lambda rank: rank.heard_s),
    ),
    Metric(
        "rank_progress_age_seconds",
        "gauge",
        "Since the rank's step loop last came round.",
        _RANK,
        read.rank_counters(lambda told: told.progress_age_s),
    ),
    Metric(
        "rank_step_seconds",
        "summary",
        "A step on this rank, waiting for the others included.",
        _RANK,
        read.rank_counters(lambda told: (told.steps, told.host_s + told.model_s)),
    ),
    Metric(
        "rank_resident_memory_bytes",
        "gauge",
        "Memory that the rank's process holds.",
        _RANK,
        read.rank_counters(lambda told: told.rss_bytes),
    ),
    Metric(
        "rank_info",
        "info",
        "Where and how the rank computes.",
        (*_RANK, "host", "numa_nodes", "device", "kernels", "threads"),
        read.rank_info,
    ),
)
