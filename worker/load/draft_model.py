"""The model that drafts for another one: its configuration, and what it cannot be."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from allspan.protos.api.errors import CheckpointError, ConfigError, ModelNotFound
from allspan.protos.api.wording import counted
from allspan.protos.config.converted_manifest import is_converted
from allspan.protos.config.settings import ModelConfig, WorkerConfig
from allspan.protos.config.speculation import DRAFT_MODEL, Speculation, speculation_of
from allspan.protos.text.vocabularies import first_difference
from allspan.worker.cache.spec import CacheGroup
from allspan.worker.load.loader import Prepared, prepare
from allspan.worker.quant.instant import SCHEMES
from allspan.worker.step.backend import KernelNeeds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedDraft:
    """All that is known of one rank's part of the model that drafts before its weights are read."""

    config: ModelConfig
    prepared: Prepared

    @property
    def weight_bytes(self) -> int:
        return self.prepared.weight_bytes

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.prepared.cache_groups

    @property
    def kernel_needs(self) -> KernelNeeds:
        """What it asks of a device's kernels."""
        return self.prepared.kernel_needs

    def beside(self, model: Prepared) -> Prepared:
        """The other model with the cache groups of this one behind its own."""
        return replace(model, cache_groups=(*model.cache_groups, *self.cache_groups))


def prepare_draft(config: WorkerConfig, max_model_len: int, rank: int, size: int) -> PreparedDraft | None:
    """What one of `size` ranks holds of the model that drafts for one of `max_model_len` tokens a request; None where
    no model does. Raises ConfigError, CheckpointError or ModelNotFound, naming the model."""
    asked = speculation_of(config)
    if asked is None or asked.method != DRAFT_MODEL:
        return None
    check_sharing(asked, config.model, size)
    own = _config_of(asked, config.model)
    try:
        longest = prepare(own, config.cache, rank, size).max_model_len
        own = replace(own, max_model_len=min(longest, max_model_len))
        found = PreparedDraft(own, prepare(own, config.cache, rank, size))
    except (ConfigError, CheckpointError, ModelNotFound) as error:
        raise type(error)(f"the model that drafts (speculative_config): {error.message}") from error
    if not all(group.lifetime.keeps_all for group in found.prepared.cache_groups):
        raise ConfigError(
            f"speculative_config: model {asked.model} has layers with a sliding window or a state, which do not go "
            "back to an earlier token: take a model whose layers attend to all tokens"
        )
    if rank == 0 and config.model.load_format != "dummy":
        _check_vocabulary(asked.model, config.model.path)
    return found


def _config_of(asked: Speculation, model: ModelConfig) -> ModelConfig:
    """The settings of the model that drafts: those of the other one that are not about its files and its experts."""
    takes_8_bits = asked.quantization in SCHEMES and not is_converted(Path(asked.model))
    return ModelConfig(
        path=asked.model,
        name=f"{model.name} (drafts)",
        dtype=model.dtype,
        quantization=asked.quantization,
        quantization_group=model.quantization_group if asked.quantization == model.quantization else 0,
        quantize_lm_head=model.quantize_lm_head or takes_8_bits,  # half of a small model in 4 bits; no answer changes
        load_format=model.load_format,
        device=model.device,
        disable_cascade_attn=True,
        verify=model.verify,
    )


def check_sharing(asked: Speculation, model: ModelConfig, size: int) -> None:
    """Raises ConfigError for ranks that cannot share the model that drafts."""
    ranks = asked.draft_tensor_parallel_size
    if ranks and ranks != size:
        raise ConfigError(
            f"speculative_config: draft_tensor_parallel_size is {ranks}, must be the model's {counted(size, 'rank')}: "
            "leave it out"
        )
    if model.data_parallel_attention and size > 1:
        raise ConfigError(
            "speculative_config: a model that drafts does not go with data_parallel_attention, where ranks have pages "
            'of their own: leave one out, or take {"method": "suffix"}'
        )


def _check_vocabulary(draft: str, model: str) -> None:
    """Raises ConfigError for a model with other tokens."""
    try:
        difference = first_difference(Path(model), Path(draft))
    except (CheckpointError, ModelNotFound) as error:
        logger.warning("%s drafts for %s, whether they have the same tokens is not known: %s", draft, model, error)
        return
    if difference:
        raise ConfigError(
            f"speculative_config: model {draft} has other tokens than {model}: {difference}; take a model of the same "
            "family"
        )
