"""The load of this server as routers ask for it: all replicas behind the facade together, as one worker."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.client.gateway.context import GatewayContext
from allspan.protos import vllm_worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Load:
    """A snapshot of the load; zeros where nothing has answered."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    """Share of the KV pages in use, from 0 to 1; those kept for prefix hits do not count."""
    capacity_tokens: int = 0
    tokens_per_s: float = 0.0
    hit_rate: float = 0.0
    waiting_tokens: int = 0
    """Prompt tokens of the waiting requests of this facade, less the share that the prefix cache has held so far."""

    @property
    def used_tokens(self) -> int:
        return round(self.usage * self.capacity_tokens)


async def present_load(context: GatewayContext) -> Load:
    """Returns the load, 0.2 s old at most."""
    told = (await context.snapshots.look()).statistics
    if told is None:
        return Load()
    silent = [request for request in context.admission.running_requests() if not request.num_output_tokens]
    youngest = sorted(silent, key=lambda request: -request.origin.arrived)[: told.waiting]
    return Load(
        running=told.running,
        waiting=told.waiting,
        usage=told.kv_usage,
        capacity_tokens=told.fullest_pages_total * told.page_size,
        tokens_per_s=told.generated_tokens_per_s,
        hit_rate=told.prefix_hit_rate,
        waiting_tokens=round(sum(request.num_prompt_tokens for request in youngest) * (1 - told.prefix_hit_rate)),
    )


def scheduler_load(load: Load) -> pb.SchedulerLoad:
    return pb.SchedulerLoad(
        dp_rank=0,
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=load.used_tokens,
        max_total_num_tokens=load.capacity_tokens,
        token_usage=load.usage,
        gen_throughput=load.tokens_per_s,
        cache_hit_rate=load.hit_rate,
        utilization=load.usage,
        num_waiting_uncached_tokens=load.waiting_tokens,
    )


def engine_load(load: Load, sample: int, load_only: bool) -> pb.EngineLoad:
    """Returns the record that stands in a batch of KV events. `sample`: its number in the stream."""
    return pb.EngineLoad(
        running_requests=load.running,
        waiting_requests=load.waiting,
        waiting_uncached_tokens=load.waiting_tokens,
        token_usage=load.usage,
        active_token_usage=load.usage,
        gen_throughput=load.tokens_per_s,
        sample=sample,
        load_only=load_only,
        cache_hit_rate=load.hit_rate,
        num_used_tokens=load.used_tokens,
        max_total_num_tokens=load.capacity_tokens,
    )
