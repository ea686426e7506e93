"""An adapter's adapter_config.json, as PEFT writes it: what its products are multiplied by, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.json_values import read_json_object, shown
from allspan.worker.models.foreign.config import ForeignConfig

CONFIG_FILE = "adapter_config.json"

_EMPTY: tuple[Any, ...] = (None, False, {}, [], "")
_UNSUPPORTED = {
    "use_dora": "adapters with a magnitude (DoRA)",
    "lora_bias": "biases of adapters",
    "fan_in_fan_out": "weights that lie transposed",
    "modules_to_save": "whole layers beside the adapter",
    "trainable_token_indices": "trained rows of the embedding",
    "target_parameters": "adapters of tensors that are no layers",
    "layer_replication": "repeated layers",
    "use_qalora": "pooled inputs (QA-LoRA)",
    "use_bdlora": "block-diagonal matrices (BD-LoRA)",
    "alora_invocation_tokens": "adapters that begin within a prompt (aLoRA)",
    "arrow_config": "mixtures of adapters (Arrow)",
}
"""Keys that change what is computed, each with what it stands for; refused with any value that is not empty."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Beginnings of `init_lora_weights` of adapters that belong to a changed base model."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What of adapter_config.json inference needs."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    """Products are multiplied by alpha / sqrt(rank) instead of alpha / rank (D. Kalajdzievski, arXiv:2312.03732)."""
    ranks: tuple[tuple[re.Pattern[str], int], ...]
    """The ranks of modules whose names match; the first that does counts."""
    alphas: tuple[tuple[re.Pattern[str], float], ...]

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's matrices."""
        return next((rank for pattern, rank in self.ranks if pattern.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Returns what a module's product is multiplied by."""
        rank = self.rank_of(module)
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.match(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_peft_config(folder: Path) -> PeftConfig:
    """Reads a folder's adapter_config.json. Raises CheckpointError for what is malformed, and by name for what would
    not be computed exactly."""
    path = folder / CONFIG_FILE
    config = ForeignConfig(read_json_object(path), str(path))
    kind = config.text("peft_type")
    if kind != "LORA":
        raise config.error(f"peft_type {shown(kind)} is not supported (supported: LORA)")
    for key, what in _UNSUPPORTED.items():
        if config.get(key) not in _EMPTY:
            raise config.error(f"{key} {shown(config.get(key))} is not supported: {what}; merge it into the model")
    if config.get("bias") not in (None, "none"):
        raise config.error(f"bias {shown(config.get('bias'))} is not supported (supported: none)")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise config.error(
            f"init_lora_weights {shown(init)} is not supported, since it changes the base model's weights: save the "
            "adapter converted to plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    ranks = tuple((pattern, config_of.size(key)) for pattern, key, config_of in _patterns(config, "rank_pattern"))
    alphas = tuple((pattern, config_of.number(key)) for pattern, key, config_of in _patterns(config, "alpha_pattern"))
    return PeftConfig(config.size("r", 8), config.number("lora_alpha", 8.0), config.flag("use_rslora"), ranks, alphas)


def _patterns(config: ForeignConfig, name: str) -> list[tuple[re.Pattern[str], str, ForeignConfig]]:
    """The regular expressions that are the keys of an object; they match the last parts of a module's name."""
    section = config.section(name)
    if section is None:
        return []
    keys: dict[str, Any] = config.get(name)
    try:
        return [(re.compile(rf"(.*\.)?({key})$"), key, section) for key in keys]
    except re.error as error:
        raise CheckpointError(f"{section.source}: {shown(error.pattern)} is no regular expression: {error}") from None
