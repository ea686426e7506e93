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
from allspan.protos.config.settings import ModelConfig, WorkerConfig
from allspan.protos.config.speculation import EAGLE3, MTP, speculation_of
from allspan.protos.model_files.json_values import read_json_object
from allspan.worker.cache.spec import CacheGroup
from allspan.worker.load.draft_model import PreparedDraft, check_sharing, prepare_draft
from allspan.worker.load.loader import Prepared, needs_of
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.heads.eagle3 import EMBEDDING, SKIPPED, TARGET_IDS, eagle3_weights, read_eagle3
from allspan.worker.models.heads.mtp import has_mtp, mtp_spec, mtp_weights
from allspan.worker.models.holding import Holding
from allspan.worker.models.layout import IGNORED_TENSORS, cache_groups, check_ranks, expected_shapes
from allspan.worker.models.model import Model
from allspan.worker.models.spec import HeadSpec
from allspan.worker.parallel.base import Collectives
from allspan.worker.quant.base import LinearMethod
from allspan.worker.quant.head import QuantisedHead
from allspan.worker.quant.instant import SCHEMES
from allspan.worker.quant.table import METHODS
from allspan.worker.step.backend import Backend, KernelNeeds
from allspan.worker.step.buffer_sizes import ModelLimits
from allspan.worker.weights.checkpoint import Checkpoint, check_tensors
from allspan.worker.weights.random_weights import RandomWeights
from allspan.worker.weights.tensor_folder import TensorFolder

Ids = NDArray[np.int32]
_EMBEDDINGS = "embed_tokens.", "model.embed_tokens."
_COMPARED = 64
"""Rows of embeddings that are compared."""


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

    @property
    def kernel_needs(self) -> KernelNeeds:
        """What it asks of a device's kernels."""
        return needs_of(self.spec, str(self.holding.dtype).removeprefix("torch."), self.cache_groups)

    def beside(self, model: Prepared) -> Prepared:
        """The target with the cache groups of the head behind its own."""
        return replace(model, cache_groups=(*model.cache_groups, *self.cache_groups))

    def is_like(self, other: PreparedHead) -> bool:
        """Whether weights of one can take the place of those of the other."""
        mine, theirs = (None if ids is None else ids.tolist() for ids in (self.target_ids, other.target_ids))
        return self.spec == other.spec and mine == theirs


PreparedDrafter = PreparedDraft | PreparedHead


def prepare_drafter(config: WorkerConfig, model: Prepared, rank: int, size: int) -> PreparedDrafter | None:
    """What one of `size` ranks holds of what drafts for a model, of which it holds `model`; None where nothing does.
    Raises as `prepare_draft` and `prepare_head`."""
    return prepare_draft(config, model.max_model_len, rank, size) or prepare_head(config, model)


def prepare_head(config: WorkerConfig, target: Prepared, held: HeadSpec | None = None) -> PreparedHead | None:
    """What a rank holds of the head that drafts for a target, of which it holds `target`; None where none does. `held`:
    of the head that is to be read again. Raises ConfigError or CheckpointError."""
    asked = speculation_of(config)
    if asked is None or asked.method not in (EAGLE3, MTP):
        return None
    check_sharing(asked, config.model, target.holding.shard.size)
    if asked.method == MTP:
        return prepare_mtp(config.model, target)
    quantization = "none" if asked.quantization == "auto" else asked.quantization
    try:
        return prepare_eagle3(asked.model, config.model, target, quantization, held)
    except (ConfigError, CheckpointError) as error:
        raise type(error)(f"the head that drafts (speculative_config): {error.message}") from error


def prepare_eagle3(
    path: str, config: ModelConfig, target: Prepared, quantization: str = "none", held: HeadSpec | None = None
) -> PreparedHead:
    """Opens the EAGLE-3 head in the folder `path` for a target of this configuration. Where one is `held` already, it
    goes on with the embedding that it has. Raises CheckpointError or ConfigError."""
    file, is_random = Path(path).expanduser() / "config.json", config.load_format == "dummy"
    checkpoint = None if is_random else TensorFolder(file.parent)
    names: Collection[str] = () if checkpoint is None else checkpoint.names()
    if checkpoint is not None and (not held.has_embedding if held else _has_embedding_of(checkpoint, target)):
        names = [name for name in names if name != eagle3_weights(names).foreign(EMBEDDING, checkpoint.naming)]
    spec = read_eagle3(ForeignConfig(read_json_object(file), str(file)), target.source.spec, names)
    dtype = target.holding.dtype
    holding = Holding(
        spec,
        target.holding.shard,
        eagle3_weights(names),
        _method(quantization, config, dtype),
        dtype,
        quantization=quantization,
        memory=target.holding.memory,
        target=target.holding,
    )
    skipped = SKIPPED if spec.has_embedding else (*SKIPPED, *_EMBEDDINGS)
    head = _prepared(holding, spec, checkpoint, target, skipped)
    if checkpoint is None:
        return head
    return replace(head, target_ids=_target_ids(checkpoint, spec, target.source.spec.vocab_size))


def _method(quantization: str, config: ModelConfig, dtype: torch.dtype) -> LinearMethod:
    """How the weights of a head are held; one that is quantised at load has its product of logits in 8 bits, which
    changes no answer. Raises ConfigError for what is not known."""
    if quantization not in ("none", *SCHEMES):
        known = ", ".join(("auto", "none", *SCHEMES))
        raise ConfigError(f"quantization {quantization!r} is not known for a head ({known})")
    group = config.quantization_group if quantization == config.quantization else 0
    method = METHODS[quantization](dtype, group)
    return QuantisedHead(method, dtype) if quantization in SCHEMES or config.quantize_lm_head else method


def _has_embedding_of(checkpoint: TensorFolder, target: Prepared) -> bool:
    """Whether a head's embedding is a copy of its target's, as far as some of its rows tell: then it need not be held
    twice."""
    source = target.source
    if source.gguf is not None or source.converted is not None or source.quantised is not None:
        return False
    whole, own = TensorFolder(source.path), eagle3_weights(checkpoint.names())
    names = [each.foreign(EMBEDDING, whole.naming) for each in (own, source.family.weights)]
    if names[0] not in checkpoint.names() or checkpoint.shape(names[0]) != whole.shape(names[1]):
        return False
    count, width = checkpoint.shape(names[0])
    rows = range(0, count, max(1, count // _COMPARED))
    both = [torch.empty((len(rows), width)) for _ in names]
    for folder, name, out in zip((checkpoint, whole), names, both, strict=True):
        folder.read(name, [rows, range(width)], out)
    return torch.equal(*both)


def prepare_mtp(config: ModelConfig, target: Prepared) -> PreparedHead:
    """Opens the layer for multi-token prediction of the target's checkpoint. Raises CheckpointError or ConfigError."""
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
    has none. The target keeps the states that it reads. Raises CheckpointError, and ConfigError for a target whose
    tokens have other positions than their numbers."""
    given = target.row_inputs
    if given.num_positions > 1 or given.prompt_lengths:
        raise ConfigError(
            "speculative_config: the model has rotary embeddings of several positions, or by the prompt's length, and "
            'no head drafts for it: take {"method": "suffix"}'
        )
    target.keep_features(head.spec.features)
    holding = replace(head.holding, packer=Packer(ops.runtime), target=target.holding)
    tensors = holding.read(head.checkpoint, backend.capabilities.tensors)
    model = Model(holding, tensors, head.cache_groups, limits, ops, collectives, backend)
    model.borrow(target)
    return model


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
    outside = ((found < 0) | (found >= vocab_size)).nonzero()
    if len(outside):
        first = int(outside[0])
        raise CheckpointError(
            f"{checkpoint.where(TARGET_IDS)}: tensor {TARGET_IDS!r} leads from the head's id {first} to "
            f"{int(found[first])}, must be to one from 0 to {vocab_size - 1}: it is the head of another model"
        )
    ids: Ids = found.to(torch.int32).numpy()
    return ids
