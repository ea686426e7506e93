"""What a model takes on each rank, without loading it.

`python -m allspan.worker.tools.memory_plan CONFIG.json --ranks N`

Prints a MemoryPlan as JSON on standard output, or {"error", "message"}. A launcher runs it as a process: reading models
needs torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from allspan.protos.api.errors import AllspanError, ConfigError
from allspan.protos.config.config_json import from_json, settled
from allspan.protos.config.settings import ModelConfig, WorkerConfig
from allspan.worker.adapters.opening import adapter_slots, bytes_of_adapters
from allspan.worker.backend.table import open_backend
from allspan.worker.cache.budget import (
    CacheDemand,
    GroupDemand,
    Room,
    context_tokens,
    group_demands,
    num_kv_pages,
    pages_of,
)
from allspan.worker.load.attention_ranks import check_attention
from allspan.worker.load.draft_heads import PreparedDrafter, PreparedHead, prepare_drafter
from allspan.worker.load.loader import Prepared, prepare
from allspan.worker.models.blocks.mla import Mla
from allspan.worker.models.decoder import Decoder, build_decoder
from allspan.worker.models.holding import Holding
from allspan.worker.models.layout import cache_groups, layer_pieces
from allspan.worker.models.pieces import Linear
from allspan.worker.models.shard import Place, Shard, make_shard
from allspan.worker.models.spec import ModelSpec
from allspan.worker.models.spec_json import spec_json
from allspan.worker.program.program import Rows, buffer_bytes
from allspan.worker.step.buffer_sizes import ModelLimits, most_logits_rows
from allspan.worker.tools.token_bytes import count_parameters, token_bytes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank. `kv_bytes` is what its cache would take, `host_kv_bytes` its second tier, `step_bytes` on a
    GPU the buffers that steps write to, and the widest of what a step has for itself."""

    rank: int
    weight_bytes: int
    kv_bytes_per_page: int
    """The bytes of one page of each cache group."""
    kv_bytes: int
    host_kv_bytes: int = 0
    step_bytes: int = 0
    layers: tuple[int, int] = (0, 0)
    """Its first layer and its last + 1."""
    token_bytes: int = 0
    busiest_token_bytes: int = 0
    """What a decode step of one token reads of the weights: `allspan.worker.tools.token_bytes.TokenBytes`."""


@dataclass(frozen=True, slots=True)
class TokenKv:
    """Bytes that a token's keys and values take in the pages of all layers."""

    rank: int
    """On one rank, where it is most."""
    every_rank: int
    """On all ranks together."""
    freed: int
    """What data-parallel attention saves of all ranks' bytes, or would save: what several hold alike. 0 where it is
    refused."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`max_model_len` is what a request may use; `largest_model_len` what would fit into the same budget of KV (no more
    than the model's context). `num_pages` 0 and `refusal` when a full context does not fit."""

    model: dict[str, Any]
    """Its spec, and `num_layers`, `num_heads` and `num_kv_heads`."""
    dtype: str
    quantization: str
    page_size: int
    max_model_len: int
    largest_model_len: int
    num_pages: int
    """The pages of the first cache group on each rank, which holds all tokens if any group does."""
    num_tokens: int
    """Tokens of full contexts that the pages of all cache groups hold, those of all attention ranks together."""
    host_pages: int
    """The host pages of each cache group."""
    available_bytes: int
    refusal: str
    ranks: tuple[RankMemory, ...]
    stages: int = 1
    """Equally many ranks hold each stage's layers."""
    parameters: int = 0
    active_parameters: int = 0
    """The parameters that a token uses."""
    attention_ranks: int = 1
    """Ranks that have pages of their own for requests of their own; 1: all ranks have the pages of all requests."""
    token_kv: TokenKv = TokenKv(0, 0, 0)


def plan_memory(config: WorkerConfig, num_ranks: int, available: Room, ranks_on_node: int) -> MemoryPlan:
    """`available` is what a node or GPU has before any weight is loaded; its ranks' weights are taken off first.

    Raises ModelNotFound, CheckpointError or ConfigError as loading would.
    """
    prepared = _prepared(config, num_ranks)
    first = prepared[0]
    drafts = [prepare_drafter(config, each, rank, num_ranks) for rank, each in enumerate(prepared)]
    held = [draft.beside(each) if draft else each for each, draft in zip(prepared, drafts, strict=True)]
    page_bytes = [sum(group.spec.bytes_per_page for group in rank.cache_groups) for rank in held]
    widest, widest_groups = max(page_bytes), _widest(held)
    heaviest = max(_weight_bytes(rank, draft, config) for rank, draft in zip(prepared, drafts, strict=True))
    config = settled(config)
    step = max(step_bytes(rank, config, draft) for rank, draft in zip(prepared, drafts, strict=True))
    left = Room(max(0, available.available - (heaviest + step) * ranks_on_node), available.total)
    page_size, num_seqs = config.cache.page_size, config.scheduler.max_num_seqs

    def demand(max_model_len: int) -> CacheDemand:
        tokens = config.scheduler.max_num_batched_tokens
        return CacheDemand(widest_groups, max_model_len, num_seqs, left, ranks_on_node, max_step_tokens=tokens)

    def pages(max_model_len: int) -> tuple[int, ...]:
        return num_kv_pages(config.cache, demand(max_model_len))

    try:
        counts, refusal = pages(first.max_model_len), ""
    except ConfigError as error:
        counts, refusal = (0,) * len(widest_groups), error.message
    context = demand(first.max_model_len).context_pages(first.max_model_len, page_size)
    tiered = config.cache.host_kv_cache_bytes if config.cache.enable_prefix_caching else 0
    host_pages = tiered // widest
    if tiered and not host_pages:
        refusal = refusal or f"host_kv_cache_bytes is {tiered}, must be at least a page's ({widest} bytes), or 0"
    numbers, apart = count_parameters(first.source.spec), num_ranks if first.holding.shard.attends_apart else 1
    return MemoryPlan(
        model=_described(first.source.spec),
        dtype=str(first.holding.dtype).removeprefix("torch."),
        quantization=first.holding.quantization,
        page_size=page_size,
        max_model_len=first.max_model_len,
        largest_model_len=_largest(pages, first.source.spec.max_position_embeddings, page_size),
        num_pages=counts[0],
        num_tokens=min(context_tokens(counts, context, first.max_model_len, page_size)) * apart,
        host_pages=host_pages,
        available_bytes=available.available,
        refusal=refusal,
        ranks=tuple(
            _rank_memory(rank, each, drafts[rank], config, counts, host_pages) for rank, each in enumerate(held)
        ),
        stages=config.parallel.pipeline_parallel_size,
        parameters=numbers.total,
        active_parameters=numbers.active,
        attention_ranks=apart,
        token_kv=_token_kv(config.model, prepared, drafts, page_size),
    )


def _token_kv(
    config: ModelConfig,
    prepared: Sequence[Prepared],
    drafts: Sequence[PreparedDrafter | None],
    page_size: int,
) -> TokenKv:
    """See `TokenKv`."""
    shards, spec = [each.holding.shard for each in prepared], prepared[0].source.spec
    dtype = prepared[0].cache_groups[0].spec.dtype

    def token_bytes(shard: Shard) -> int:
        return sum(group.spec.bytes_per_page for group in cache_groups(spec, shard, page_size, dtype)) // page_size

    shared = sum(token_bytes(make_shard(each.rank, each.size, each.stage)) for each in shards)
    whole = token_bytes(make_shard(0, 1))
    is_apart, may_be = shards[0].attends_apart, _may_attend_apart(config, prepared[0])
    groups = [draft.cache_groups if draft else () for draft in drafts]
    drafting = [sum(group.spec.bytes_per_page for group in each) // page_size for each in groups]
    most = max(own + more for own, more in zip(map(token_bytes, shards), drafting, strict=True))
    return TokenKv(most, (whole if is_apart else shared) + sum(drafting), shared - whole if may_be else 0)


def _may_attend_apart(config: ModelConfig, prepared: Prepared) -> bool:
    """Whether these ranks could attend for requests of their own."""
    shard, is_converted = prepared.holding.shard, prepared.source.converted is not None
    try:
        check_attention(replace(config, data_parallel_attention=True), shard.size, shard.stage, is_converted)
    except ConfigError:
        return False
    return True


def _prepared(config: WorkerConfig, num_ranks: int) -> list[Prepared]:
    stages = config.parallel.pipeline_parallel_size
    if num_ranks % stages:
        raise ConfigError(f"pipeline_parallel_size is {stages}, which does not divide {num_ranks} ranks")
    width = num_ranks // stages
    return [
        prepare(config.model, config.cache, number, width, Place(stage, stages))
        for stage in range(stages)
        for number in range(width)
    ]


def _rank_memory(
    rank: int,
    prepared: Prepared,
    draft: PreparedDrafter | None,
    config: WorkerConfig,
    pages: Sequence[int],
    host_pages: int,
) -> RankMemory:
    """`pages` of each cache group; `prepared` has those of `draft`, too."""
    page_bytes, read = [group.spec.bytes_per_page for group in prepared.cache_groups], token_bytes(prepared.holding)
    return RankMemory(
        rank=rank,
        weight_bytes=_weight_bytes(prepared, draft, config),
        kv_bytes_per_page=sum(page_bytes),
        kv_bytes=sum(each * count for each, count in zip(page_bytes, pages, strict=True)),
        host_kv_bytes=sum(page_bytes) * host_pages,
        step_bytes=step_bytes(prepared, config, draft),
        layers=_layers(prepared),
        token_bytes=read.mean,
        busiest_token_bytes=read.busiest,
    )


def _weight_bytes(prepared: Prepared, draft: PreparedDrafter | None, config: WorkerConfig) -> int:
    """The bytes of a rank's weights, with the slots of its adapters and the weights of what drafts."""
    device = open_backend(config.model.device).capabilities.tensors
    more = draft.weight_bytes if draft else 0
    return prepared.weight_bytes + more + bytes_of_adapters(prepared.holding, config.adapters, device)


def _layers(prepared: Prepared) -> tuple[int, int]:
    layers = prepared.holding.shard.layers(len(prepared.source.spec.layers))
    return layers.start, layers.stop


def _widest(prepared: Sequence[Prepared]) -> tuple[GroupDemand, ...]:
    """Each cache group with the largest pages that a rank has of it."""
    by_rank = [group_demands(rank.cache_groups) for rank in prepared]
    return tuple(max(group, key=lambda each: each.bytes_per_page) for group in zip(*by_rank, strict=True))


def step_bytes(prepared: Prepared, config: WorkerConfig, draft: PreparedDrafter | None = None) -> int:
    """See `RankMemory`. A step's own is measured where it runs; here it is the output of its widest linear layer, and
    that layer's weight in 16 bits where it is held in fewer; captured steps keep as much beside those that are launched
    op by op. Attention keeps room for keys and values of latents. The pass of steps with adapters has buffers of its
    own, as has what drafts, whose steps never run at the same time."""
    if not open_backend(config.model.device).capabilities.has_own_memory:
        return 0
    holding, slots = prepared.holding, adapter_slots(prepared.holding, config.adapters)
    features = draft.spec.features if isinstance(draft, PreparedHead) else ()
    passes = [holding] if slots is None else [holding, replace(holding, delta=slots)]
    buffers = _buffer_bytes([build_decoder(each, features=features) for each in passes], holding, config)
    buffers += _attention_bytes(prepared, config)
    widest = _widest_bytes(holding, _layers(prepared), config)
    if isinstance(draft, PreparedHead):
        kinds = (False, True) if draft.spec.reads.tells_states_apart else (False,)
        own = [build_decoder(draft.holding, is_chained=is_chained) for is_chained in kinds]
        buffers += _buffer_bytes(own, draft.holding, config)
        widest = max(widest, _widest_bytes(draft.holding, (0, len(draft.spec.layers)), config))
    elif draft is not None:
        buffers += _buffer_bytes([build_decoder(draft.prepared.holding)], draft.prepared.holding, config)
        buffers += _attention_bytes(draft.prepared, config)
        widest = max(widest, _widest_bytes(draft.prepared.holding, _layers(draft.prepared), config))
    return buffers + widest * (1 if config.model.enforce_eager else 2)


def _buffer_bytes(decoders: Sequence[Decoder], holding: Holding, config: WorkerConfig) -> int:
    """What the ops of these passes write to."""
    tokens, most = config.scheduler.max_num_batched_tokens, most_logits_rows(config.scheduler.max_num_seqs)
    capacity = {Rows.TOKENS: tokens, Rows.OWN: tokens, Rows.LOGITS: most}
    return sum(buffer_bytes(decoder.program, capacity, _activations(holding)) for decoder in decoders)


def _attention_bytes(prepared: Prepared, config: WorkerConfig) -> int:
    """What attention over latents keeps for itself, once for all blocks with the same heads."""
    tokens, most = config.scheduler.max_num_batched_tokens, most_logits_rows(config.scheduler.max_num_seqs)
    backend, limits = open_backend(config.model.device), ModelLimits(tokens, most, prepared.max_model_len)
    blocks = (layer.attention for layer in prepared.holding.spec.layers)
    kinds = {block.on_rank(prepared.holding.shard) for block in blocks if isinstance(block, Mla)}
    return sum(backend.attention_bytes(heads, limits) for heads in kinds)


def _widest_bytes(holding: Holding, layers: tuple[int, int], config: WorkerConfig) -> int:
    """What the widest product of a step has for itself."""
    shapes = [
        (sum(shape.parts), len(shape.inputs))
        for layer in range(*layers)
        for piece in layer_pieces(holding.spec, layer)
        if isinstance(piece, Linear)
        for shape in [holding.shape_of(piece)]
    ]
    tokens, is_packed = config.scheduler.max_num_batched_tokens, holding.quantization != "none"
    return max(outputs * (tokens + inputs * is_packed) for outputs, inputs in shapes) * _activations(holding).itemsize


def _activations(holding: Holding) -> torch.dtype:
    return holding.dtype if holding.memory == "rows" else torch.float32


def _described(spec: ModelSpec) -> dict[str, Any]:
    block = spec.layers[0].attention
    heads = {"num_heads": block.heads.count, "num_kv_heads": block.kv_heads.count}
    return spec_json(spec) | {"num_layers": len(spec.layers)} | heads


def _largest(pages: Callable[[int], tuple[int, ...]], limit: int, page_size: int) -> int:
    """The longest context up to `limit` for which `pages` does not refuse; 0 if not even one page fits."""

    def fits(num_pages: int) -> bool:
        try:
            return min(pages(min(num_pages * page_size, limit))) > 0
        except ConfigError:
            return False

    low, high = 0, pages_of(limit, page_size)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return min(low * page_size, limit)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m allspan.worker.tools.memory_plan", description=__doc__)
    parser.add_argument("config", metavar="CONFIG.json", help="Names the configuration that the ranks would get.")
    parser.add_argument("--ranks", type=int, required=True, help="Sets the number of ranks.")
    parser.add_argument(
        "--ranks-on-node", type=int, default=0, help="Says how many ranks share a node's memory; 0: all of them."
    )
    parser.add_argument("--available", type=int, help="Sets the bytes of memory to plan for, as another host has them.")
    arguments = parser.parse_args(argv)
    try:
        if arguments.ranks < 1:
            raise ConfigError(f"--ranks {arguments.ranks}: must be at least 1")
        config = from_json(Path(arguments.config).read_text(encoding="utf-8"))
        backend = open_backend(config.model.device)
        backend.check()
        given = arguments.available
        available = backend.room(config.parallel.cpus) if given is None else Room(given)
        plan = plan_memory(config, arguments.ranks, available, arguments.ranks_on_node or arguments.ranks)
    except AllspanError as error:
        print(json.dumps({"error": error.code, "message": error.message}))
        return 1
    print(json.dumps(asdict(plan)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
