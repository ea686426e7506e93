"""The table of an engine's counters: each is declared once, with what replicas and metrics make of it.

The scheduler counts in them, a rank sends them with its status, the client adds up those of the replicas, `/metrics`
has a row for each that names its metric, and `/cluster` lists those that only rise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Combine = Callable[[Sequence[Any]], Any]

STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the sizes of steps, in tokens, that are counted apart; see `EngineCounters.step_tokens`."""


class Metric(NamedTuple):
    """A counter's row of /metrics: a counter where its name ends in _total, else a gauge."""

    name: str
    help: str


def counter(default: T, metric: Metric | None = None, is_total: bool = False, combine: Combine = sum) -> T:
    """Declares a counter. `combine` makes one value of the replicas'; `is_total`: it only rises."""
    return field(default=default, metadata={"metric": metric, "is_total": is_total, "combine": combine})


def _added(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*histograms, strict=False)))


def _added_up(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(*lists, fillvalue=0)))


@dataclass(slots=True, kw_only=True)
class EngineCounters:
    """An engine's counters since it started. A follower knows rows, refusals, steps, times and its weights only."""

    running: int = counter(0, Metric("num_requests_running", "Requests in the running batch."))
    waiting: int = counter(0, Metric("num_requests_waiting", "Requests in the leader's queue."))
    pages_total: int = counter(0)
    """Pages of all cache groups together, as in `pages_used` and `pages_cached`."""
    pages_used: int = counter(0)
    pages_cached: int = counter(0)
    """Pages neither free nor used: kept for prefix hits, and freed when pages run short."""
    fullest_pages_total: int = counter(0)
    """The pages of the cache group with the largest share in use: the first that requests wait for."""
    fullest_pages_used: int = counter(0)
    free_tokens: int = counter(0)
    """Tokens that the pages not in use hold, in the cache group that has place for the fewest."""
    filling_tokens: int = counter(0)
    """Tokens of full contexts that take every page of every cache group."""
    page_size: int = counter(0, combine=itemgetter(0))
    """Tokens; the same in every replica."""
    host_pages_total: int = counter(0)
    host_pages_used: int = counter(0)
    prompt_tokens: int = counter(0, is_total=True)
    generated_tokens: int = counter(0, is_total=True)
    finished_requests: int = counter(0, is_total=True)
    """Requests that ended, for whatever reason."""
    cancelled_requests: int = counter(0, is_total=True)
    failed_requests: int = counter(0, is_total=True)
    refused_requests: int = counter(0, is_total=True)
    """Requests refused by a full queue, or by a full inbox."""
    preemptions: int = counter(
        0, Metric("num_preemptions_total", "Requests preempted for want of pages."), is_total=True
    )
    steps: int = counter(0, is_total=True)
    prefix_query_tokens: int = counter(
        0, Metric("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")
    )
    prefix_hit_tokens: int = counter(0, Metric("prefix_cache_hits_total", "Of those, the tokens found."))
    prefix_host_hit_tokens: int = counter(0)
    """Number of the found tokens that came from the host tier."""
    drafts: int = counter(
        0, Metric("spec_decode_num_drafts_total", "Runs of drafts that were verified."), is_total=True
    )
    draft_tokens: int = counter(
        0, Metric("spec_decode_num_draft_tokens_total", "Drafts that were verified."), is_total=True
    )
    accepted_tokens: int = counter(
        0, Metric("spec_decode_num_accepted_tokens_total", "Of those, the drafts that were kept."), is_total=True
    )
    accepted_per_position: Sequence[int] = counter((), combine=_added_up)
    """Drafts that were kept, by their position in their run."""
    host_s: float = counter(0.0)
    """Seconds of steps outside the model's forward pass."""
    model_s: float = counter(0.0)
    """Seconds inside the forward pass."""
    prompt_tokens_per_s: float = counter(0.0)
    """Prompt tokens a second over about the last 10 s."""
    generated_tokens_per_s: float = counter(0.0)
    """Over the last 10 s or so."""
    weights_version: int = counter(1, combine=min)
    """Rises with each reload, also one that was refused: what was cached under another version is invalid."""
    weights_loaded: bool = counter(
        True, Metric("weights_loaded", "1 while the replica's weights are in memory."), combine=all
    )
    adapter_slots: int = counter(0, Metric("lora_slots", "Slots for LoRA adapters on the device."), combine=min)
    adapters_loaded: int = counter(0, Metric("loras_loaded", "LoRA adapters that are loaded."), combine=max)
    """Includes those that were unloaded and that requests still have."""
    adapter_swaps: int = counter(
        0, Metric("lora_swaps_total", "Times that a LoRA adapter took another one's slot."), is_total=True
    )
    step_tokens: Sequence[int] = counter((), combine=_added)
    """Steps by the tokens computed in them: as many as have at most each of STEP_TOKENS_BOUNDS (and more than the one
    before), then those above them all."""
    step_tokens_sum: int = counter(0)


COUNTERS = {each.name: each.metadata for each in fields(EngineCounters)}
"""The declaration of each counter, by name."""


def combined(counters: Sequence[EngineCounters]) -> dict[str, Any]:
    """Returns each counter's value over several replicas, at least one."""
    return {name: told["combine"]([getattr(each, name) for each in counters]) for name, told in COUNTERS.items()}


def counters_of(source: EngineCounters) -> dict[str, Any]:
    """Returns each counter's value, by name."""
    return {name: getattr(source, name) for name in COUNTERS}
