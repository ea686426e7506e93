"""The metrics that have vLLM's full names as well, for endpoint pickers and autoscalers that know no others.

A value stands for all replicas behind this server together, without a `replica` label: to a router the server is one
endpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from allspan.client.gateway.metrics.collect import Read, Scene, Value
from allspan.client.gateway.metrics.table import METRICS, Metric
from allspan.protos.api.engine import EngineStatistics

VLLM_PREFIX = "vllm:"

_OTHER_NAMES = {"time_per_output_token_seconds": "request_time_per_output_token_seconds"}
_SHARED = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
)
"""Metrics of the gateway itself, which vLLM has, too."""
_TOTALS: dict[str, Callable[[EngineStatistics], float]] = {
    "num_requests_running": lambda told: told.running,
    "num_requests_waiting": lambda told: told.waiting,
    "num_preemptions_total": lambda told: told.preemptions,
    "prefix_cache_queries_total": lambda told: told.prefix_query_tokens,
    "prefix_cache_hits_total": lambda told: told.prefix_hit_tokens,
    "kv_cache_usage_perc": lambda told: told.kv_usage,
    "spec_decode_num_drafts_total": lambda told: told.drafts,
    "spec_decode_num_draft_tokens_total": lambda told: told.draft_tokens,
    "spec_decode_num_accepted_tokens_total": lambda told: told.accepted_tokens,
}
"""Metrics of the replicas, and the value of their sums."""


def _total(value: Callable[[EngineStatistics], float]) -> Read:
    def read(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
        if (told := scene.view.statistics) is not None:
            yield (), value(told)

    return read


def _accepted_drafts(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
    if (told := scene.view.statistics) is not None:
        for position, count in enumerate(told.accepted_per_position):
            yield (str(position),), count


def _cache_config(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
    if (told := scene.view.statistics) is not None:
        yield (str(told.page_size), str(told.fullest_pages_total)), 1


def _lora(scene: Scene) -> Iterator[tuple[tuple[str, ...], Value]]:
    adapters = [adapter.name for adapter in scene.context.model.adapters]
    asked = [
        (request.handle.model, request.num_output_tokens) for request in scene.context.admission.running_requests()
    ]
    running = {name for name, num_tokens in asked if num_tokens}
    waiting = {name for name, num_tokens in asked if not num_tokens}
    states = (",".join(name for name in adapters if name in those) for those in (running, waiting))
    told = scene.view.statistics
    slots = len(adapters) if told is None else told.adapter_slots
    yield (str(slots), *states), time.time()  # the newest row counts, by its value


def _rows() -> Iterator[Metric]:
    known = {metric.name: metric for metric in METRICS}
    for name in _SHARED:
        row = known[name]
        yield Metric(_OTHER_NAMES.get(name, name), row.kind, row.help, row.labels, row.read)
    for name, value in _TOTALS.items():
        yield Metric(name, known[name].kind, f"{known[name].help} All replicas.", (), _total(value))
    row = known["spec_decode_num_accepted_tokens_per_pos_total"]
    yield Metric(row.name, row.kind, f"{row.help} All replicas.", ("position",), _accepted_drafts)
    yield Metric(
        "cache_config_info",
        "info",
        "Tokens of a page of the KV cache, and the number of pages of the fullest cache group.",
        ("block_size", "num_gpu_blocks"),
        _cache_config,
    )
    yield Metric(
        "lora_requests_info",
        "gauge",
        "The time of the scrape, with the adapters of requests that have had a token, and of those that have not.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        _lora,
    )


VLLM_METRICS = tuple(_rows())
