"""From a path on disk to a Model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from allspan.kernels.ops import OpSet
from allspan.kernels.packer import Packer
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.hf_overrides import parse_overrides
from allspan.protos.config.settings import CacheConfig, ModelConfig, WorkerConfig
from allspan.worker.backend.table import open_backend
from allspan.worker.cache.spec import ITEM_BITS, CacheGroup
from allspan.worker.load.attention_ranks import attends_apart, check_attention
from allspan.worker.load.converted import ConvertedWeights
from allspan.worker.load.expert_checks import check_expert_bytes, check_router
from allspan.worker.load.expert_placements import ONE_RANK, expert_groups, placements
from allspan.worker.load.registry import ModelSource, find_model, with_random_weights
from allspan.worker.models.holding import Holding, Progress
from allspan.worker.models.layout import (
    IGNORED_TENSORS,
    cache_groups,
    check_ranks,
    check_stages,
    expected_shapes,
    foreign_tensors,
)
from allspan.worker.models.model import Model
from allspan.worker.models.pieces import Vector
from allspan.worker.models.shard import WHOLE, Place, make_shard
from allspan.worker.models.spec import ModelSpec
from allspan.worker.parallel.base import Collectives
from allspan.worker.quant.gguf import native
from allspan.worker.quant.head import QuantisedHead
from allspan.worker.quant.stored import stored_layout
from allspan.worker.quant.table import COMPACT, METHODS, OWN, ROWS_ONLY, STORED, group_of
from allspan.worker.step.backend import KernelNeeds
from allspan.worker.step.buffer_sizes import ModelLimits
from allspan.worker.weights.checkpoint import Checkpoint, check_tensors, draft_layers
from allspan.worker.weights.mxfp4_folder import Mxfp4Folder
from allspan.worker.weights.quantised_folder import PLAIN
from allspan.worker.weights.quantised_matrix import without_order
from allspan.worker.weights.random_weights import RandomWeights
from allspan.worker.weights.tensor_folder import TensorFolder

logger = logging.getLogger(__name__)

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
_UNDESCRIBED = "there is no quantization_config in its config.json"
_QUANTISED_NAMES = (".qweight", ".qzeros", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".absmax")


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is known of one rank's model before its weights are read."""

    source: ModelSource
    holding: Holding
    cache_groups: tuple[CacheGroup, ...]
    max_model_len: int
    held: Mapping[str, str | int]
    """The settings of HELD_FIELDS, "auto" and 0 made definite."""

    @property
    def weight_bytes(self) -> int:
        return self.holding.num_bytes

    @property
    def kernel_needs(self) -> KernelNeeds:
        """What the model asks of a device's kernels."""
        return needs_of(self.source.spec, str(self.held["dtype"]), self.cache_groups)


def needs_of(spec: ModelSpec, dtype: str, groups: Sequence[CacheGroup]) -> KernelNeeds:
    """What a model asks of a device's kernels; `dtype` of the weights that are not quantised."""
    attention = [layer.attention for layer in spec.layers]
    blocks = {(block.heads, block.kv_heads) for block in attention}
    heads = tuple((own.unit, -(-own.count // kv.count)) for own, kv in blocks)
    latents = tuple({block.latent_sizes for block in attention if block.latent_sizes})
    return KernelNeeds(dtype, groups[0].spec.dtype, heads, latents)


def prepare(config: ModelConfig, cache: CacheConfig, rank: int, size: int, stage: Place = WHOLE) -> Prepared:
    """Reads the model's config and settles what one of the `size` ranks of a stage holds. Raises as `load_model`
    does."""
    source = find_model(config.path, parse_overrides(config.hf_overrides))
    if config.load_format == "dummy":
        source = with_random_weights(source, config.quantization)
    if source.converted is not None:
        config = replace(config, **source.converted.held(config))
    is_apart = attends_apart(config, size)
    check_attention(config, size, stage, source.converted is not None)
    check_ranks(source.spec, 1 if is_apart else size)
    check_stages(source.spec, stage.size)
    groups = expert_groups(config, source.spec, size)
    shard = make_shard(rank, size, stage, groups, is_apart)
    quantization = quantization_of(config, source)
    dtype = weight_dtype(config.dtype, source.spec, quantization, config.device)
    memory = memory_of(config.device, dtype)
    _check_norms(source.spec, memory)
    if quantization in ROWS_ONLY and memory != "rows" and quantization != own_quantization(source):
        raise ConfigError(
            f"quantization {quantization!r} is for models of 16 bits on GPUs; device is {config.device}, dtype {dtype}"
            ": use --device cuda, or --quantization a8w8"
        )
    if dtype == "float16" and memory != "rows":
        raise ConfigError(
            f"dtype 'float16' is for GPUs; device is {config.device}, where float16 weights are held as float32, which "
            "is exact: use --dtype auto, or --device cuda"
        )
    if source.converted is not None:
        _check_converted(config, memory, stage)
    pages = _page_dtype(cache.kv_cache_dtype, dtype, source.spec)
    method = METHODS[quantization](getattr(torch, dtype), config.quantization_group)
    holding = Holding(
        source.spec,
        shard,
        source.family.weights,
        QuantisedHead(method, getattr(torch, dtype)) if config.quantize_lm_head else method,
        getattr(torch, dtype),
        source.stored,
        quantization,
        memory=memory,
        placements=placements(config, source.spec, groups),
    )
    check_router(holding)
    check_expert_bytes(holding)
    return Prepared(
        source=source,
        holding=holding,
        cache_groups=cache_groups(source.spec, shard, cache.page_size, pages),
        max_model_len=context_length(config.max_model_len, source.spec),
        held={
            "dtype": dtype,
            "quantization": quantization,
            "quantization_group": group_of(quantization, config.quantization_group),
        },
    )


def _check_converted(config: ModelConfig, memory: str, stage: Place) -> None:
    """Raises ConfigError for what the files of a converted model are not for."""
    if config.enable_expert_parallel:
        raise ConfigError("a converted model has slices of every expert: leave --enable-expert-parallel out")
    if config.quantize_lm_head:
        raise ConfigError(
            f"quantize_lm_head: {config.path} is converted, its head as it was: load the model that it was made from, "
            "or leave --quantize-lm-head out"
        )
    if stage.size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {stage.size}, but {config.path} is converted, in files that hold all layers: "
            "load the model that it was made from"
        )
    if memory != "panels":
        raise ConfigError(
            f"{config.path} is converted, and converted weights lie in panels, for CPUs; device is {config.device}: "
            "load the model that it was made from"
        )


def _page_dtype(wanted: str, dtype: str, spec: ModelSpec) -> str:
    """Returns the dtype of the pages of a model in `dtype`. ConfigError for what is not known, for bfloat16 beside
    float16, and for fp8 where a layer holds more than latents."""
    held = dtype if wanted == "auto" else wanted
    if held not in ITEM_BITS:
        raise ConfigError(f"kv_cache_dtype {wanted!r} is not known (auto, {', '.join(ITEM_BITS)})")
    if held != dtype and (held == "float16" or (held, dtype) == ("bfloat16", "float16")):
        raise ConfigError(
            f"kv_cache_dtype {wanted!r} does not go with dtype {dtype!r}: use auto (the same), float32, int8 or uint4"
        )
    if held == "fp8" and not all(layer.attention.is_latent for layer in spec.layers):
        raise ConfigError("kv_cache_dtype 'fp8' is for latents (multi-head latent attention): take int8 or uint4")
    return held


def load_model(
    config: ModelConfig,
    collectives: Collectives,
    ops: OpSet,
    max_tokens: int,
    max_requests: int,
    on_progress: Progress | None = None,
    cache: CacheConfig | None = None,
    check_room: Callable[[Prepared], None] = lambda prepared: None,
) -> Model:
    """Reads this rank's slices of the checkpoint and builds its Model.

    Buffers are made for steps of at most `max_tokens` tokens and `max_requests` rows of logits.
    `on_progress(done_bytes, total_bytes)` is called after each weight. `cache` gives the pages' size and dtype.
    `check_room` gets what is known before the first weight is read or a table is made, and may raise.
    Raises ModelNotFound, CheckpointError or ConfigError.
    """
    backend = open_backend(config.device)
    backend.check()
    prepared = prepare(config, cache or CacheConfig(), collectives.rank, collectives.size, stage_of(collectives))
    if collectives.rank == 0:
        note_decoded(config.path, prepared.holding)
    holding = replace(prepared.holding, packer=Packer(ops.runtime))
    weights = open_weights(prepared.source, holding, config)
    check_room(prepared)
    begun = time.monotonic()
    tensors = weights.read(backend.capabilities.tensors, on_progress)
    logger.info("weights: %.2f GiB read in %.1f s", prepared.weight_bytes / 2**30, time.monotonic() - begun)
    # Page numbers of requests of other attention ranks say nothing here of what requests share.
    uses_cascades = not (config.disable_cascade_attn or attends_apart(config, collectives.size))
    limits = ModelLimits(max_tokens, max_requests, prepared.max_model_len, uses_cascades)
    return Model(holding, tensors, prepared.cache_groups, limits, ops, collectives, backend)


def stage_of(collectives: Collectives) -> Place:
    """Returns the place of these ranks' layers in the pipeline."""
    pipe = collectives.capabilities.pipe
    return WHOLE if pipe is None else Place(pipe.stage, pipe.num_stages)


class Weights(Protocol):
    """What a rank holds, opened and checked; nothing is read yet."""

    def read(
        self, device: str, on_progress: Progress | None, into: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Canonical name → tensor on `device`; `into` are the tensors of an earlier reading, to be filled again where
        they lie. Raises CheckpointError."""


def open_weights(source: ModelSource, holding: Holding, config: ModelConfig) -> Weights:
    """Opens weights that were converted, or the slices of a checkpoint. Raises CheckpointError or ConfigError."""
    if source.converted is not None:
        return ConvertedWeights(source.converted, holding, config.verify)
    return CheckpointWeights(holding, open_checkpoint(source, config.load_format))


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """See `Weights`."""

    holding: Holding
    checkpoint: Checkpoint

    def read(
        self, device: str, on_progress: Progress | None, into: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        return self.holding.read(self.checkpoint, device, on_progress, into)


def open_ops(config: WorkerConfig, kernels: str = "auto") -> OpSet:
    """The op set for the model's device and dtype, or the one that `kernels` names. ConfigError for a device, threads,
    an instruction set or a library that cannot be had."""

    def needs() -> KernelNeeds:
        whole = replace(config.model, **ONE_RANK)
        return prepare(whole, config.cache, 0, 1).kernel_needs

    backend, parallel = open_backend(config.model.device), config.parallel
    try:
        return backend.open_ops(kernels, parallel.threads, parallel.cpus, needs)
    except ValueError as error:
        raise ConfigError(f"kernels is {kernels!r}: {error}") from error
    except RuntimeError as error:  # the system's limit of threads, or processors that are not this process's
        raise ConfigError(f"threads is {parallel.threads}, which cannot be started: {error}") from error


def open_checkpoint(source: ModelSource, load_format: str) -> Checkpoint:
    """Opens the weights and checks that they are those of the config; nothing is read yet."""
    spec, weights = source.spec, source.family.weights
    if load_format == "dummy":
        ours = foreign_tensors(spec, weights, RandomWeights.naming)
        kinds = {each.name: source.stored.get(weights.foreign(each.canonical, "gguf"), "") for each in ours}
        shapes = expected_shapes(spec, weights, RandomWeights.naming)
        return RandomWeights(shapes, {name: kind for name, kind in kinds.items() if kind})
    if load_format != "auto":
        raise ConfigError(f"load_format {load_format!r} is not known (auto, dummy)")
    checkpoint: Checkpoint = source.gguf or source.quantised or TensorFolder(source.path)
    for name in checkpoint.names():
        if name.endswith(_QUANTISED_NAMES):
            known = source.quantised is not None
            lack = "the codes of its matrix are missing" if known else _UNDESCRIBED
            raise CheckpointError(f"{checkpoint.where(name)}: tensor {name!r} is of a quantised checkpoint, and {lack}")
    expected = expected_shapes(spec, weights, checkpoint.naming)
    family = source.family
    ignored = IGNORED_TENSORS + family.ignored
    if spec.tie_word_embeddings:  # a head may be there, equal to the embedding or out of date
        ignored += (weights.foreign("lm_head.weight", checkpoint.naming),)
    if source.quantised is not None:
        ignored += source.quantised.idle_biases(expected)
    drafting = draft_layers(checkpoint.names(), len(spec.layers)) if family.has_draft_layers else ()
    check_tensors(checkpoint, expected, ignored, (*family.skipped, *drafting))
    return checkpoint


def quantization_of(config: ModelConfig, source: ModelSource) -> str:
    """The linear method; "auto" is a checkpoint's own where its matrices are quantised, else "none"."""
    name, own = config.quantization, own_quantization(source)
    if name == "auto":
        return own
    if name not in METHODS:
        raise ConfigError(f"quantization {name!r} is not known (auto, {', '.join(METHODS)})")
    if name != own and (name in STORED or (name == "gguf" and source.gguf is None)):
        others = ", ".join(each for each in METHODS if each not in ("gguf", *STORED))
        kind = "GGUF files" if name == "gguf" else "checkpoints that are quantised so"
        raise ConfigError(f"quantization {name!r} is for {kind}, and {config.path} is none: use {others}")
    return name


def own_quantization(source: ModelSource) -> str:
    """The method that holds a checkpoint's matrices as they are quantised; "none" where they are not."""
    if source.converted is not None:
        return str(source.converted.manifest.held.get("quantization", "none"))
    if source.quantised is not None or source.drawn:
        return Mxfp4Folder.method if source.quantised is None else source.quantised.method
    return "gguf" if source.gguf is not None and source.gguf.is_quantised() else "none"


def weight_dtype(wanted: str, spec: ModelSpec, quantization: str = "none", device: str = "cpu") -> str:
    """One of WEIGHT_DTYPES; "auto" is the checkpoint's, but float16 on CPUs, which have no kernels for it, is held as
    float32 (exact), and what is left of a model whose linear weights are quantised as bfloat16, unless a GPU holds it
    as the float16 that it is. A model whose activations float16 does not hold is bfloat16 there."""
    if wanted == "auto":
        if spec.dtype == "float16" and "float16" in open_backend(device).capabilities.row_dtypes:
            return "bfloat16" if spec.leaves_float16 else "float16"
        return "bfloat16" if spec.dtype == "bfloat16" or quantization in COMPACT else "float32"
    if wanted not in WEIGHT_DTYPES:
        raise ConfigError(f"dtype {wanted!r} is not known (auto, {', '.join(WEIGHT_DTYPES)})")
    if wanted == "float16" and spec.leaves_float16:
        raise ConfigError(
            f"dtype 'float16' is not supported for {spec.family}, whose activations float16 cannot hold: use bfloat16 "
            "or float32"
        )
    return wanted


def _check_norms(spec: ModelSpec, memory: str) -> None:
    """Blocks of a GPU read 16 bits, which the norm before them makes of the residual stream."""
    norms = [norm for layer in spec.layers for norm in (layer.attention_norms, layer.mlp_norms)]
    if memory == "rows" and any(norm.before is None for norm in norms):
        raise ConfigError(
            f"{spec.family} has no norm before its blocks, which the kernels of a GPU need in 16 bits: use "
            "--device cpu, or --dtype float32"
        )


def memory_of(device: str, dtype: str) -> str:
    """How packed weights lie (`allspan.kernels.packed_spec.MEMORIES`); see `Capabilities.row_dtypes`. Models of other
    dtypes run the reference, which takes either."""
    return "rows" if dtype in open_backend(device).capabilities.row_dtypes else "panels"


def note_decoded(path: str, holding: Holding) -> None:
    """Says which types of a quantised checkpoint are not computed with as they are."""
    pieces = [piece for piece in holding.pieces if not isinstance(piece, Vector)]
    kinds = {(kind, shape) for shape in map(holding.shape_of, pieces) for kind in shape.stored}
    has_blocks = holding.quantization in ("gguf", "mxfp4")
    decoded = sorted(
        {
            _without_order(kind)
            for kind, shape in kinds
            if kind not in ("F32", "BF16", PLAIN, "", "F16" if holding.dtype is torch.float16 else "")
            and (native(kind, shape.memory) if has_blocks else stored_layout(kind, shape)) is None
        }
    )
    if holding.quantization in OWN and decoded:
        held = str(holding.dtype).removeprefix("torch.")
        logger.warning("%s: tensors of type %s are decoded and held as %s", path, ", ".join(decoded), held)


def _without_order(kind: str) -> str:
    """See `allspan.worker.weights.quantised_matrix.QuantisedMatrix.kind`: every matrix has an order of its own."""
    plain = without_order(kind)
    return kind if plain == kind else f"{plain} with inputs out of order"


def context_length(wanted: int, spec: ModelSpec) -> int:
    """`max_model_len`, or the model's own for 0."""
    limit = spec.max_position_embeddings
    if wanted < 0 or wanted > limit:
        raise ConfigError(
            f"max_model_len {wanted} is not within 1 … {limit}, the model's context (0: all of it): --hf-overrides "
            "with rope_parameters of yarn lengthens it"
        )
    return wanted or limit
