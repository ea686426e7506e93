"""From a configuration to an EngineCore: the model is loaded, the cache is sized and bound. The same for every rank of
a cluster and for `Engine`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.jit.variants import variants_of
from allspan.kernels.ops import OpSet
from allspan.protos.api.errors import ConfigError
from allspan.protos.config.config_json import check, settled
from allspan.protos.config.settings import ModelConfig, WorkerConfig
from allspan.protos.text.model_defaults import generation_defaults
from allspan.worker.backend.cuda.event_wait import Patience
from allspan.worker.backend.cuda.host_pages import HostPages
from allspan.worker.backend.cuda.sampling import device_sampling
from allspan.worker.backend.cuda.streams import cuda_lanes
from allspan.worker.backend.cuda.warmup import rehearse
from allspan.worker.cache.available_memory import available_bytes, room
from allspan.worker.cache.budget import CacheDemand, check_weights_fit, num_kv_pages
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.tiers import Tiers
from allspan.worker.engine.core import EngineCore
from allspan.worker.engine.weights import Weights
from allspan.worker.load.loader import load_model
from allspan.worker.models.model import Model
from allspan.worker.models.spec import ModelSpec
from allspan.worker.parallel.base import Collectives, PlanChannel
from allspan.worker.sampling.kernel import sampling_kernel
from allspan.worker.scheduler.limits import most_logits_rows
from allspan.worker.scheduler.plan import Operation

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A rank that is ready to step, and what there is to say about it."""

    core: EngineCore
    model: Model
    weights: Weights
    eos_token_ids: tuple[int, ...]
    """Of the model's config and its generation_config.json together."""
    kv_bytes: int
    load_s: float


def load_engine(
    config: WorkerConfig,
    ops: OpSet,
    collectives: Collectives,
    channel: PlanChannel | None = None,
    ranks_on_node: int = 1,
    on_progress: OnProgress | None = None,
    await_others: Callable[[], None] = lambda: None,
) -> LoadedEngine:
    """Every rank of a world calls it at once. `ranks_on_node` share the memory of the node or GPU; `await_others` waits
    until each of them has read its weights, however long that takes.

    Raises ModelNotFound, CheckpointError, or ConfigError (also when one full context does not fit the cache).
    """
    started = time.monotonic()
    config = settled(check(config))
    model, cache, most = config.model, config.cache, config.scheduler
    logits = most_logits_rows(most.max_num_seqs)

    def check_room(weight_bytes: int) -> None:
        check_weights_fit(weight_bytes, room(model.device, config.parallel.cpus), ranks_on_node)
        await_others()  # a rank that reads already leaves less to those that look

    loaded = load_model(model, collectives, ops, most.max_num_batched_tokens, logits, on_progress, cache, check_room)
    await_others()
    width = loaded.vocab_widths[collectives.rank % len(loaded.vocab_widths)]
    patience = Patience(config.service.watchdog_timeout)
    open_sampling = partial(device_sampling, torch.device(model.device), most.max_num_seqs, width, patience)
    on_device, step_bytes = rehearse(loaded, model.device, most, open_sampling)
    await_others()  # what a rank takes for that is not there for good
    sampling = on_device or sampling_kernel(getattr(ops, "runtime", None))
    host = _host_tier(config, loaded, collectives)
    demand = CacheDemand(
        bytes_per_page=loaded.cache_spec.bytes_per_page,
        max_model_len=loaded.max_model_len,
        max_num_seqs=most.max_num_seqs,
        room=room(model.device, config.parallel.cpus),
        ranks=ranks_on_node,
        step_bytes=step_bytes,
    )
    num_pages = agreed_pages(config, demand, collectives)
    kv = KVCache(loaded.cache_spec, num_pages, model.device)
    loaded.bind_cache(kv)
    eos = ends_of(model, loaded.spec)
    tiers = Tiers(kv, host) if host else None
    core = EngineCore(config, loaded, num_pages, collectives, channel, eos, tiers, sampling)
    steps: _Steps | None = None
    if model.device == "cuda":
        are_captured = not model.enforce_eager and getattr(collectives, "is_capturable", True)
        steps = _Steps(core, patience, host if isinstance(host, HostPages) else None, are_captured)
        steps.capture()
    pages = [tensor for each in (kv, host) if isinstance(each, KVCache) for tensor in (*each.keys, *each.values)]
    weights = Weights(loaded, model, cache, collectives, tuple(pages), await_others, steps)
    core.on_operation = _on_operation(core, loaded, weights)
    return LoadedEngine(core, loaded, weights, eos, kv.num_bytes, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Steps:
    """See `allspan.worker.backend.cuda.capture.GpuSteps`."""

    core: EngineCore
    patience: Patience
    host: HostPages | None
    are_captured: bool

    def drain(self) -> None:
        self.patience.drain()
        if self.host is not None:
            self.host.drain(self.patience)

    def capture(self) -> None:
        if self.are_captured:
            self.core.capture()


def ends_of(model: ModelConfig, spec: ModelSpec) -> tuple[int, ...]:
    """The ids that end an answer: those of the config and of generation_config.json together, sorted."""
    more = () if model.load_format == "dummy" else generation_defaults(model.path).eos_token_ids
    return tuple(sorted({*spec.eos_token_ids, *more}))


def _on_operation(core: EngineCore, model: Model, weights: Weights) -> Callable[[Operation], None]:
    """What a rank does at an operation of a plan."""
    actions: dict[Operation, Callable[[], None]] = {
        Operation.UNLOAD_WEIGHTS: weights.unload,
        Operation.RELOAD_WEIGHTS: lambda: weights.reload(core.beat),
        Operation.START_PROFILE: model.start_profile,
        Operation.STOP_PROFILE: model.stop_profile,
    }

    def operate(operation: Operation) -> None:
        try:
            actions[operation]()
        finally:
            core.weights_loaded = weights.is_loaded

    return operate


def _host_tier(config: WorkerConfig, model: Model, collectives: Collectives) -> KVCache | HostPages | None:
    """In as many pages as every rank has bytes for. Raises ConfigError for less than one page, and for more memory than
    there is."""
    cache, device = config.cache, config.model.device
    budget = cache.host_kv_cache_bytes
    if not budget or not cache.enable_prefix_caching:
        return None
    page_bytes = model.cache_spec.bytes_per_page
    pages = min(everyones(budget // page_bytes, collectives))
    if pages == 0:
        raise ConfigError(
            f"host_kv_cache_bytes is {budget}, must be at least a page's ({page_bytes} bytes on this rank), or 0"
        )
    if device != "cuda" or not modules.can_launch():
        return KVCache(model.cache_spec, pages)
    if 0 < (left := available_bytes(config.parallel.cpus)) < pages * page_bytes:
        raise ConfigError(f"host_kv_cache_bytes is {budget}, but {left} bytes of memory are available: set it lower")
    modules.driver().prepare(variants_of(["cache.move_pages"], modules.gpu(torch.device(device)).capability))
    host = HostPages(model.cache_spec, pages, device, cuda_lanes())
    host.pin()
    return host


def everyones(value: int, collectives: Collectives) -> list[int]:
    """Every rank's value, in rank order; int32."""
    mine = torch.tensor([[min(value, 2**31 - 1)]], dtype=torch.int32)
    everyone = torch.empty((collectives.size, 1), dtype=torch.int32)
    collectives.all_gather_rows(mine, everyone)
    return [int(count) for count in everyone[:, 0].tolist()]


def agreed_pages(config: WorkerConfig, demand: CacheDemand, collectives: Collectives) -> int:
    """The smallest of the ranks' page counts, since one page number means the same page on each of them.

    A rank for which not even one context fits raises its own ConfigError, and its peers one that names it.
    """
    failure: ConfigError | None = None
    try:
        pages = num_kv_pages(config.cache, demand)
    except ConfigError as error:
        failure, pages = error, 0
    counts = everyones(pages, collectives)
    if failure is not None:
        raise failure
    if 0 in counts:
        raise ConfigError(f"the KV cache does not fit on rank {counts.index(0)}; its own message has the numbers")
    return min(counts)
