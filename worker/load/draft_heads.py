"""Draft heads beside their target: read from a folder of their own, or from layers of the target's checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.kernels.ops import OpSet
from allspan.kernels.packer import Packer
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.settings import ModelConfig
from allspan.protos.model_files.json_values import read_json_object
from allspan.worker.cache.spec import CacheGroup
from allspan.worker.load.loader import Prepared
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.heads.eagle3 import SKIPPED, TARGET_IDS, eagle3_weights, read_eagle3
from allspan.worker.models.heads.mtp import has_mtp, mtp_spec, mtp_weights
from allspan.worker.models.holding import Holding
from allspan.worker.models.layout import IGNORED_TENSORS, cache_groups, check_ranks, expected_shapes
from allspan.worker.models.model import Model
from allspan.worker.models.spec import HeadSpec
from allspan.worker.parallel.base import Collectives
from allspan.worker.quant.table import METHODS
from allspan.worker.step.backend import Backend
from allspan.worker.step.buffer_sizes import ModelLimits
from allspan.worker.weights.checkpoint import Checkpoint, check_tensors
from allspan.worker.weights.random_weights import RandomWeights
from allspan.worker.weights.tensor_folder import TensorFolder

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PreparedHead:
    """All that is known of one rank's draft head before its weights are read."""

    spec: HeadSpec
    holding: Holding
    checkpoint: Checkpoint
    cache_groups: tuple[CacheGroup, ...]
    target_ids: Ids | None = None
    """For each id of the head that of its target; None: they are the same."""

    @property
    def weight_bytes(self) -> int:
        return self.holding.num_bytes


def prepare_eagle3(path: str, config: ModelConfig, target: Prepared, quantization: str = "none") -> PreparedHead:
    """Opens the EAGLE-3 head in the folder `path` for a target of this configuration. Raises CheckpointError or
    ConfigError."""
    _check_target(config, target, "eagle3")
    file, is_random = Path(path).expanduser() / "config.json", config.load_format == "dummy"
    checkpoint = None if is_random else TensorFolder(file.parent)
    names: Collection[str] = () if checkpoint is None else checkpoint.names()
    spec = read_eagle3(ForeignConfig(read_json_object(file), str(file)), target.source.spec, names)
    dtype = target.holding.dtype
    if quantization not in METHODS:
        raise ConfigError(f"speculative_config: quantization {quantization!r} is not known ({', '.join(METHODS)})")
    holding = Holding(
        spec,
        target.holding.shard,
        eagle3_weights(names),
        METHODS[quantization](dtype, config.quantization_group),
        dtype,
        quantization=quantization,
        memory=target.holding.memory,
        target=target.holding,
    )
    head = _prepared(holding, spec, checkpoint, target, SKIPPED)
    if checkpoint is None:
        return head
    return replace(head, target_ids=_target_ids(checkpoint, spec, target.source.spec.vocab_size))


def prepare_mtp(config: ModelConfig, target: Prepared) -> PreparedHead:
    """Opens the layer for multi-token prediction of the target's checkpoint. Raises CheckpointError or ConfigError."""
    _check_target(config, target, "mtp")
    source, checkpoint = target.source, None
    if config.load_format != "dummy":
        if source.gguf is not None or source.converted is not None:
            kind = "a GGUF file" if source.gguf is not None else "converted"
            raise ConfigError(
                f"speculative_config: method mtp reads layers that {config.path}, which is {kind}, does not have or "
                "names otherwise: take the model in Hugging Face's layout"
            )
        checkpoint = source.quantised or TensorFolder(source.path)
        if not has_mtp(checkpoint.names(), source.spec):
            raise ConfigError(
                f"speculative_config: method is mtp, but {config.path} has no layer for multi-token prediction behind "
                f"its {len(source.spec.layers)} layers: use another method"
            )
    spec = mtp_spec(source.spec)
    weights = mtp_weights(source.family.weights, source.spec)
    holding = replace(target.holding, spec=spec, weights=weights, placements={}, target=target.holding)
    return _prepared(holding, spec, checkpoint, target, ("",))  # the rest are the target's


def load_head(
    head: PreparedHead, target: Model, limits: ModelLimits, ops: OpSet, collectives: Collectives, backend: Backend
) -> Model:
    """Reads this rank's slices of the head and builds its Model, which uses the target's embedding and head where it
    has none. Raises CheckpointError."""
    holding = replace(head.holding, packer=Packer(ops.runtime), target=target.holding)
    tensors = holding.read(head.checkpoint, backend.capabilities.tensors)
    model = Model(holding, tensors, head.cache_groups, limits, ops, collectives, backend)
    model.borrow(target)
    return model


def _check_target(config: ModelConfig, target: Prepared, method: str) -> None:
    """Raises ConfigError for targets whose ranks cannot run a head."""
    if target.holding.shard.attends_apart:
        raise ConfigError(
            f"speculative_config: method {method} is not for data-parallel attention, whose ranks have keys of their "
            "own requests alone: leave --data-parallel-attention out"
        )


def _prepared(
    holding: Holding, spec: HeadSpec, checkpoint: Checkpoint | None, target: Prepared, skipped: tuple[str, ...]
) -> PreparedHead:
    """Checks the tensors of a head; None: it gets random ones."""
    check_ranks(spec, holding.shard.size)
    naming = RandomWeights.naming if checkpoint is None else checkpoint.naming
    shapes = expected_shapes(spec, holding.weights, naming)
    if checkpoint is None:
        checkpoint = RandomWeights(shapes)
    else:
        check_tensors(checkpoint, shapes, IGNORED_TENSORS, skipped)
    pages, is_latent = target.cache_groups[0].spec, spec.layers[0].attention.is_latent
    kept = pages.dtype if pages.dtype != "fp8" or is_latent else str(holding.dtype).removeprefix("torch.")
    groups = cache_groups(spec, holding.shard, pages.page_size, kept)
    return PreparedHead(spec, holding, checkpoint, groups)


def _target_ids(checkpoint: TensorFolder, spec: HeadSpec, vocab_size: int) -> Ids | None:
    """The target's ids of a head's; None: they are the same. Raises CheckpointError."""
    if TARGET_IDS not in checkpoint.names():
        if spec.vocab_size != vocab_size:
            raise CheckpointError(
                f"{checkpoint.where(TARGET_IDS)}: tensor {TARGET_IDS!r} is missing, which says what the head's "
                f"{spec.vocab_size} ids are among {vocab_size}"
            )
        return None
    offsets: Tensor = checkpoint.view(TARGET_IDS)
    if offsets.shape != (spec.vocab_size,) or offsets.is_floating_point():
        raise CheckpointError(
            f"{checkpoint.where(TARGET_IDS)}: tensor {TARGET_IDS!r} has shape {list(offsets.shape)} of "
            f"{offsets.dtype}, expected {spec.vocab_size} whole numbers"
        )
    found = torch.arange(spec.vocab_size) + offsets.long()
    if not bool(((found >= 0) & (found < vocab_size)).all()):
        raise CheckpointError(f"{checkpoint.where(TARGET_IDS)}: tensor {TARGET_IDS!r} leads to ids that are not there")
    ids: Ids = found.to(torch.int32).numpy()
    return ids
