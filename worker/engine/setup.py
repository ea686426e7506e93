"""From a configuration to an EngineCore: the model is loaded, the cache is sized and bound. The same for every rank of
a cluster and for `Engine`."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from allspan.kernels.ops import OpSet
from allspan.kernels.packer import Packer
from allspan.kernels.table import op_set
from allspan.protos.api.errors import ConfigError, Unavailable
from allspan.protos.api.wording import counted
from allspan.protos.config.config_json import check, settled
from allspan.protos.config.settings import ModelConfig, WorkerConfig
from allspan.protos.config.speculation import speculation_of
from allspan.protos.text.model_defaults import generation_defaults
from allspan.worker.adapters.opening import check_adapters, open_adapters
from allspan.worker.backend.table import open_backend
from allspan.worker.cache.budget import CacheDemand, Room, check_weights_fit, group_demands, num_kv_pages
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheGroup
from allspan.worker.cache.tiers import HostPages, Tiers
from allspan.worker.engine.core import EngineCore
from allspan.worker.engine.drafter import LoadedHead, load_drafter
from allspan.worker.engine.operations import OnOperation
from allspan.worker.engine.steps.draft_head import DraftHead
from allspan.worker.engine.steps.draft_model import DraftModel
from allspan.worker.engine.steps.step_times import step_times
from allspan.worker.engine.weights import AllWeights, Weights
from allspan.worker.load.attention_ranks import attention_place
from allspan.worker.load.draft_heads import PreparedDrafter, prepare_drafter
from allspan.worker.load.expert_moves import ExpertMoves
from allspan.worker.load.loader import Prepared, load_model
from allspan.worker.load.score_head import ScoreHead
from allspan.worker.models.holding import Holding
from allspan.worker.models.model import Model
from allspan.worker.models.pieces import EP
from allspan.worker.models.spec import ModelSpec
from allspan.worker.parallel.base import Collectives, PlanChannel, all_ranks
from allspan.worker.sampling.device import Sampling
from allspan.worker.scheduler.drafting.draft_run_planner import DrafterFacts
from allspan.worker.scheduler.limits import GroupLimits
from allspan.worker.scheduler.plan import Operation
from allspan.worker.step.backend import Backend, DeviceSteps, StepParts
from allspan.worker.step.buffer_sizes import batch_sizes, most_logits_rows
from allspan.worker.step.inputs import InputBuffers

OnProgress = Callable[[int, int], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A rank that is ready to step, and what there is to say about it."""

    core: EngineCore
    model: Model
    weights: AllWeights
    eos_token_ids: tuple[int, ...]
    """The ids that end a request, of the model's config and its generation_config.json together."""
    kv_bytes: int
    load_s: float
    draft_model: Model | None = None
    """A smaller one that drafts for it."""

    @property
    def weight_bytes(self) -> int:
        """The bytes of this rank's weights."""
        return sum(model.weight_bytes for model in (self.model, self.draft_model) if model is not None)

    @property
    def progress(self) -> int:
        """Counts up while a step runs; see `Interpreter.progress`."""
        return sum(model.progress for model in (self.model, self.draft_model) if model is not None)


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
    started, config = time.monotonic(), settled(check(config))
    world = _checked_world(config.parallel.pipeline_parallel_size, collectives)
    model, cache, most = config.model, config.cache, config.scheduler
    backend = open_backend(model.device, config.service.watchdog_timeout)
    logits, tensors = most_logits_rows(most.max_num_seqs), backend.capabilities.tensors
    draft: PreparedDrafter | None = None

    def check_room(prepared: Prepared) -> None:
        nonlocal draft
        _check_placements(prepared.holding, world)
        adapter_bytes = check_adapters(prepared.holding, config.adapters, tensors)
        draft = prepare_drafter(config, prepared, collectives.rank, collectives.size)
        _check_room(config, prepared, draft, adapter_bytes, backend.room(config.parallel.cpus), ranks_on_node)
        await_others()  # a rank that reads already leaves less to those that look

    loaded = load_model(model, collectives, ops, most.max_num_batched_tokens, logits, on_progress, cache, check_room)
    drafter = load_drafter(draft, config, loaded, ops, collectives, on_progress)
    beside = _packer_beside(ops, loaded.holding), backend.side_copies()
    adapters = open_adapters(loaded, config.adapters, tensors, world, *beside, await_others)
    head = _score_head(model, loaded, world.rank)
    await_others()
    cache_groups = (*loaded.cache_groups, *(drafter.model.cache_groups if drafter else ()))
    own_groups = cache_groups if isinstance(drafter, LoadedHead) else loaded.cache_groups
    lifetimes, own = [group.lifetime for group in own_groups], attention_place(model, collectives)
    sizes = batch_sizes(config, loaded.max_model_len, lifetimes, loaded.row_inputs, own)
    sampling = _sampling(backend, loaded, most.max_num_seqs, collectives.rank, ops)
    step_bytes = max(backend.warm_up(loaded, sizes, sampling), drafter.warm_up() if drafter else 0)
    await_others()  # what a rank takes for that is not there for good
    host, room = _host_pages(config, backend, cache_groups, world), backend.room(config.parallel.cpus)
    limits = loaded.max_model_len, most.max_num_seqs, room, ranks_on_node, step_bytes, most.max_num_batched_tokens
    counts = agreed_pages(config, CacheDemand(group_demands(cache_groups), *limits), world)
    kv = [backend.page_store(group.spec, count) for group, count in zip(cache_groups, counts, strict=True)]
    loaded.bind_cache(*kv[: len(loaded.cache_groups)])
    drafts = drafter.open(kv[len(loaded.cache_groups) :], collectives) if drafter else None
    eos, parts = ends_of(model, loaded.spec), StepParts(backend.step_inputs(sizes, loaded), sampling, adapters, drafts)
    groups, tiers = _group_limits(cache_groups, loaded, drafts, counts, host), Tiers(kv, host) if host else None
    core = EngineCore(config, loaded, groups, collectives, parts, channel, eos, tiers)
    record = partial(_recorded, core, model, backend, collectives)
    steps = record(loaded, parts.inputs, host)
    whole = Weights(loaded, model, cache, collectives, _page_tensors(kv, host), await_others, steps)
    steps = record(drafter.model, drafts.buffers, ()) if drafter and drafts else None
    weights = AllWeights(whole, *([drafter.weights(config, collectives, await_others, steps)] if drafter else ()))
    _draft(core, config, loaded, drafts, collectives)
    _set_operations(core, model, loaded, weights, head, ops, collectives)
    kv_bytes, load_s = sum(cache.num_bytes for cache in kv), time.monotonic() - started
    return LoadedEngine(core, loaded, weights, eos, kv_bytes, load_s, drafter.model if drafter else None)


def _sampling(backend: Backend, model: Model, max_rows: int, rank: int, ops: OpSet) -> Sampling:
    """The kernels that sample from the part of the logits that this rank has."""
    return backend.sampling(max_rows, model.vocab_widths[rank % len(model.vocab_widths)], ops)


def _recorded(
    core: EngineCore,
    config: ModelConfig,
    backend: Backend,
    collectives: Collectives,
    model: Model,
    inputs: InputBuffers,
    host: Sequence[HostPages],
) -> DeviceSteps | None:
    """The steps of a model with these inputs, recorded where that can be."""
    records = collectives.capabilities.is_capturable and not config.enforce_eager
    steps = backend.steps(model, inputs if records else None, host, core.loop_progress.beat)
    if steps is not None:
        steps.capture()
    return steps


def _draft(
    core: EngineCore,
    config: WorkerConfig,
    model: Model,
    drafter: DraftModel | DraftHead | None,
    collectives: Collectives,
) -> None:
    """Has the leader draft tokens where the configuration asks for it; all ranks time steps for that."""
    if (asked := speculation_of(config)) is None:
        return
    seconds = core.time_steps(model, collectives)
    model.forget_expert_loads()  # the tokens of these steps are nobody's
    facts: DrafterFacts | None = None
    if drafter is not None:
        to_host, longest = core.sampler.to_host, drafter.max_model_len
        times = step_times(drafter.trial, drafter.model, longest, collectives, core.limits, to_host)
        facts = DrafterFacts(drafter.max_model_len, times, drafter.follows)
    if core.is_leader:
        told = ", ".join(f"{tokens}: {1e3 * each:.3g}" for tokens, each in sorted(seconds.items()))
        logger.info("ms of steps by their tokens, for drafts: %s", told)
        core.draft_with(asked, seconds, facts)


def _page_tensors(caches: Sequence[KVCache], host: Sequence[HostPages]) -> list[Tensor]:
    """Returns the tensors that keep keys and values, on the device and in host memory."""
    pages = [tensor for cache in caches for tensor in (*cache.keys, *cache.values)]
    return pages + [tensor for tier in host for tensor in tier.tensors]


def _checked_world(wanted: int, collectives: Collectives) -> Collectives:
    """Returns the collectives over all ranks. Raises ConfigError where these are not in as many stages as the
    configuration says."""
    pipe = collectives.capabilities.pipe
    found = pipe.num_stages if pipe is not None else 1
    if wanted != found:
        raise ConfigError(
            f"pipeline_parallel_size is {wanted}, but this process is in a world of {counted(found, 'stage')}: the "
            "ranks that allspan serve starts are in stages; leave it at 1 elsewhere"
        )
    return all_ranks(collectives)


def _check_placements(holding: Holding, collectives: Collectives) -> None:
    """Raises ConfigError unless all ranks place experts alike, which they do by files of their own hosts."""
    if not holding.placements:
        return
    mine = zlib.crc32(repr(sorted(holding.placements.items())).encode()) & 0x7FFFFFFF
    everyone = [digest for (digest,) in gather_counts([mine], collectives)]
    for rank, digest in enumerate(everyone):
        if digest != everyone[0]:
            raise ConfigError(
                f"rank {rank} places experts on ranks otherwise than rank 0: --expert-load must name the same file on "
                "all hosts"
            )


def _score_head(config: ModelConfig, model: Model, rank: int) -> ScoreHead:
    """Says what the model's files say of scores, and reads their head on the leader, which makes them."""
    head = ScoreHead(config)
    model.row_inputs = replace(model.row_inputs, scorer=head)
    if rank == 0:
        head.load()
    return head


def _check_room(
    config: WorkerConfig,
    prepared: Prepared,
    draft: PreparedDrafter | None,
    more_bytes: int,
    room: Room,
    ranks: int,
) -> None:
    """Raises ConfigError for weights, or a context, that do not fit. A context that cannot fit is refused before the
    tables of its positions are made."""
    if draft is not None:
        prepared, more_bytes = draft.beside(prepared), more_bytes + draft.weight_bytes
    check_weights_fit(prepared.weight_bytes + more_bytes, room, ranks)
    groups, most = group_demands(prepared.cache_groups), config.scheduler.max_num_seqs
    num_kv_pages(config.cache, CacheDemand(groups, prepared.max_model_len, most, room, ranks))


def ends_of(model: ModelConfig, spec: ModelSpec) -> tuple[int, ...]:
    """The ids that end an answer: those of the config and of generation_config.json together, sorted."""
    more = () if model.load_format == "dummy" else generation_defaults(model.path).eos_token_ids
    return tuple(sorted({*spec.eos_token_ids, *more}))


def _packer_beside(ops: OpSet, holding: Holding) -> Packer:
    """One that packs weights while the op set runs steps: by the same kernels, on a thread of its own."""
    return Packer(op_set(ops.name).runtime if holding.memory == "panels" else None)


def _set_operations(
    core: EngineCore,
    config: ModelConfig,
    model: Model,
    weights: AllWeights,
    head: ScoreHead,
    ops: OpSet,
    collectives: Collectives,
) -> None:
    """Says what this rank does at operations of a plan."""
    moves_experts = model.holding.shard.groups[EP].size > 1
    packer = _packer_beside(ops, model.holding) if moves_experts else Packer()
    moves = ExpertMoves(model, config, collectives, weights.checkpoint, packer)
    core.operations.on_operation = _on_operation(core, model, weights, head, moves)
    core.operations.rebalance = partial(moves.rebalance, core.operate)


def _on_operation(
    core: EngineCore, model: Model, weights: AllWeights, head: ScoreHead, moves: ExpertMoves
) -> OnOperation:
    """What a rank does at an operation of a plan."""

    def unload() -> None:
        moves.drop("the weights were unloaded while experts moved")
        weights.unload()

    def rebalance() -> None:
        if not weights.is_loaded:
            raise Unavailable("the weights are unloaded; reload them first (reload_weights)")
        moves.begin()

    def reload() -> None:
        moves.drop("the weights were read again while experts moved")
        weights.reload(core.loop_progress.beat)
        if core.is_leader:
            head.load()

    actions: dict[Operation, Callable[[], None]] = {
        Operation.UNLOAD_WEIGHTS: unload,
        Operation.RELOAD_WEIGHTS: reload,
        Operation.REBALANCE_EXPERTS: rebalance,
        Operation.SWITCH_EXPERTS: moves.advance,
        Operation.START_PROFILE: model.start_profile,
        Operation.STOP_PROFILE: model.stop_profile,
    }

    def operate(operation: Operation, argument: bytes) -> None:
        try:
            if (of_adapters := core.adapters.actions.get(operation)) is not None:
                of_adapters(argument)
            else:
                actions[operation]()
        finally:
            core.operations.weights_loaded = weights.is_loaded

    return operate


def _group_limits(
    groups: Sequence[CacheGroup],
    model: Model,
    drafter: DraftModel | DraftHead | None,
    counts: Sequence[int],
    host: Sequence[HostPages],
) -> tuple[GroupLimits, ...]:
    """What the scheduler knows of the cache groups, of which those behind the model's are a drafter's; `counts`: pages
    of each."""
    num_host_pages, num_own = host[0].num_pages if host else 0, len(model.cache_groups)
    follows = drafter is not None and drafter.follows
    return tuple(
        GroupLimits(
            count,
            group.lifetime,
            num_host_pages,
            is_drafter=number >= num_own and not follows,
            is_head=number >= num_own and follows,
        )
        for number, (group, count) in enumerate(zip(groups, counts, strict=True))
    )


def _host_pages(
    config: WorkerConfig, backend: Backend, groups: Sequence[CacheGroup], collectives: Collectives
) -> list[HostPages]:
    """The second tier of each cache group, of equally many pages, as many as every rank has bytes for; empty where none
    is asked for. Raises ConfigError for less than one page of each, and for more memory than there is."""
    budget = config.cache.host_kv_cache_bytes
    if not budget or not config.cache.enable_prefix_caching:
        return []
    page_bytes = sum(group.spec.bytes_per_page for group in groups)
    pages = min(count for (count,) in gather_counts([budget // page_bytes], collectives))
    if pages == 0:
        raise ConfigError(
            f"host_kv_cache_bytes is {budget}, must be at least a page's ({page_bytes} bytes on this rank), or 0"
        )
    return [backend.host_pages(group.spec, pages, config.parallel.cpus) for group in groups]


def gather_counts(values: Sequence[int], collectives: Collectives) -> list[list[int]]:
    """Returns every rank's counts, in rank order; those above 2**31 - 1 as that number."""
    mine = torch.tensor([[min(value, 2**31 - 1) for value in values]], dtype=torch.int32)
    everyone = torch.empty((collectives.size, len(values)), dtype=torch.int32)
    collectives.all_gather_rows(mine, everyone)
    found: list[list[int]] = everyone.tolist()
    return found


def agreed_pages(config: WorkerConfig, demand: CacheDemand, collectives: Collectives) -> tuple[int, ...]:
    """The smallest of the ranks' page counts in each cache group, since one page number means the same page on each of
    them.

    A rank for which not even one context fits raises its own ConfigError, and its peers one that names it.
    """
    failure: ConfigError | None = None
    try:
        pages = num_kv_pages(config.cache, demand)
    except ConfigError as error:
        failure, pages = error, (0,) * len(demand.groups)
    counts = gather_counts(pages, collectives)
    if failure is not None:
        raise failure
    for rank, of_rank in enumerate(counts):
        if 0 in of_rank:
            raise ConfigError(f"the KV cache does not fit on rank {rank}; its own message has the numbers")
    return tuple(map(min, zip(*counts, strict=True)))
