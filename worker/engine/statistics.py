"""What an engine core counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from allspan.worker.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class CoreStatistics:
    """Counters since the start. A follower knows rows, refusals, steps, times and its weights only."""

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    page_size: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    preemptions: int = 0
    steps: int = 0
    host_s: float = 0.0
    """Seconds of steps outside the model's forward pass."""
    model_s: float = 0.0
    pages_cached: int = 0
    """Neither free nor used: kept for prefix hits."""
    host_pages_total: int = 0
    host_pages_used: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked up."""
    prefix_hit_tokens: int = 0
    prefix_host_hit_tokens: int = 0
    """Of the hits, those from the host tier."""
    cancelled_requests: int = 0
    failed_requests: int = 0
    refused_requests: int = 0
    """By a full queue, or a full inbox."""
    prompt_tokens_per_s: float = 0.0
    """Over the last 10 s or so."""
    generated_tokens_per_s: float = 0.0
    weights_version: int = 1
    """Counts the times that the weights were loaded."""
    weights_loaded: bool = True
    step_tokens: tuple[int, ...] = ()
    """See `EngineStatistics.step_tokens`."""
    step_tokens_sum: int = 0


def scheduler_statistics(scheduler: Scheduler) -> dict[str, Any]:
    """The leader's part of CoreStatistics."""
    caches = [group.cache for group in scheduler.memory.groups]
    hosts = [cache.host for cache in caches if cache.host]
    prompt, generated = scheduler.tokens_per_s()
    return {
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "pages_total": sum(cache.device.total for cache in caches),
        "pages_used": sum(cache.device.num_used for cache in caches),
        "pages_cached": sum(cache.device.num_cached for cache in caches),
        "host_pages_total": sum(host.total for host in hosts),
        "host_pages_used": sum(host.total - host.num_free for host in hosts),
        "prompt_tokens_per_s": prompt,
        "generated_tokens_per_s": generated,
        **asdict(scheduler.counters),
        "step_tokens": tuple(scheduler.counters.step_tokens),
    }
