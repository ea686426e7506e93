"""The scheduler's part of an engine's counters."""

from __future__ import annotations

from typing import Any

from allspan.protos.api.counters import counters_of
from allspan.worker.scheduler.scheduler import Scheduler


def scheduler_statistics(scheduler: Scheduler) -> dict[str, Any]:
    """The values of `EngineCounters` that the leader's scheduler knows, and the defaults of the others."""
    caches = [group.cache for group in scheduler.memory.groups]
    hosts = [cache.host for cache in caches if cache.host]
    prompt, generated = scheduler.tokens_per_s()
    return counters_of(scheduler.counters) | {
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "pages_total": sum(cache.device.total for cache in caches),
        "pages_used": sum(cache.device.num_used for cache in caches),
        "pages_cached": sum(cache.device.num_cached for cache in caches),
        "host_pages_total": sum(host.total for host in hosts),
        "host_pages_used": sum(host.total - host.num_free for host in hosts),
        "prompt_tokens_per_s": prompt,
        "generated_tokens_per_s": generated,
        "step_tokens": tuple(scheduler.counters.step_tokens),
    }
