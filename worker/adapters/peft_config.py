"""An adapter's adapter_config.json, as PEFT writes it: what its products are multiplied by, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import CheckpointError
from allspan.protos.api.wording import counted
from allspan.protos.model_files.json_values import parse_object, shown
from allspan.protos.model_files.limits import MAX_CONFIG_BYTES
from allspan.protos.model_files.regular_file import Opener, open_regular, read_regular
from allspan.protos.text.helper_process import HelperEnded, HelperProcess
from allspan.worker.models.foreign.config import ForeignConfig

CONFIG_FILE = "adapter_config.json"
MATCH_S = 5.0
"""Most seconds that the patterns of a config may take over the names of its modules."""
MATCH_BYTES = 1 << 30

_EMPTY: tuple[Any, ...] = (None, False, {}, [], "")
_UNSUPPORTED = {
    "use_dora": "adapters with a magnitude (DoRA)",
    "lora_bias": "biases of adapters",
    "fan_in_fan_out": "weights that lie transposed",
    "modules_to_save": "whole layers beside the adapter",
    "trainable_token_indices": "trained rows of the embedding",
    "ensure_weight_tying": "one adapter of both the embedding and the head that is tied to it",
    "target_parameters": "adapters of tensors that are no layers",
    "layer_replication": "repeated layers",
    "use_qalora": "pooled inputs (QA-LoRA)",
    "use_bdlora": "block-diagonal matrices (BD-LoRA)",
    "alora_invocation_tokens": "adapters that begin within a prompt (aLoRA)",
    "arrow_config": "mixtures of adapters (Arrow)",
    "kasa_config": "a base model without its smallest singular values (KaSA)",
}
"""Keys that change what is computed, each with what it stands for; refused with any value that is not empty."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` of adapters that belong to a changed base model."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What of adapter_config.json inference needs."""

    source: str
    """The file that messages name."""
    is_rank_stabilised: bool
    """Products are multiplied by alpha / sqrt(rank) instead of alpha / rank (D. Kalajdzievski, arXiv:2312.03732)."""
    ranks: Mapping[str | None, int]
    """The ranks of modules by a regular expression, of which the first that matches counts; None: of all others."""
    alphas: Mapping[str | None, float]

    def factors(self, modules: Sequence[str]) -> dict[str, tuple[int, float]]:
        """Returns the rank of each module's matrices, and what its product is multiplied by. The names are those of the
        model that was trained. Raises CheckpointError for patterns that cannot be matched, or not in time."""
        found = {}
        for module, of_rank, of_alpha in zip(modules, *self._matched(modules), strict=True):
            rank = self.ranks[of_rank]
            found[module] = rank, self.alphas[of_alpha] / (math.sqrt(rank) if self.is_rank_stabilised else rank)
        return found

    def _matched(self, modules: Sequence[str]) -> list[list[str | None]]:
        """The keys of `ranks` and those of `alphas`, one for each module. See `pattern_child`."""
        patterns = {
            name: [key for key in values if key is not None]
            for name, values in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas))
        }
        if not any(patterns.values()):
            return [[None] * len(modules)] * 2
        helper = HelperProcess("allspan.worker.adapters.pattern_child", (str(MATCH_BYTES),), {})
        try:
            answer = helper.ask({"patterns": patterns, "modules": modules, "within_s": MATCH_S}, MATCH_S)
        except TimeoutError as error:
            raise CheckpointError(
                f"{self.source}: rank_pattern and alpha_pattern take more than {MATCH_S:g} s over the names of "
                f"{counted(len(modules), 'module')}, the limit: write the names of modules instead"
            ) from error
        except HelperEnded as error:
            raise CheckpointError(
                f"{self.source}: rank_pattern and alpha_pattern cannot be matched: {error}"
            ) from error
        finally:
            helper.end()
        if "problem" in answer:
            raise CheckpointError(f"{self.source}: {answer['problem']}")
        return [answer[name] for name in patterns]


def read_peft_config(folder: Path, opener: Opener = open_regular) -> PeftConfig:
    """Reads a folder's adapter_config.json. Raises CheckpointError for what is malformed, and by name for what would
    not be computed exactly."""
    path = folder / CONFIG_FILE
    config = ForeignConfig(parse_object(read_regular(path, MAX_CONFIG_BYTES, opener), str(path)), str(path))
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
    return PeftConfig(
        str(path),
        config.flag("use_rslora"),
        {None: config.size("r", 8)} | {key: each.size(key) for key, each in _patterns(config, "rank_pattern")},
        {None: config.number("lora_alpha", 8.0)}
        | {key: each.number(key) for key, each in _patterns(config, "alpha_pattern")},
    )


def _patterns(config: ForeignConfig, name: str) -> Iterator[tuple[str, ForeignConfig]]:
    """The keys of an object, which are regular expressions, and the object."""
    section = config.section(name)
    if section is not None:
        yield from ((key, section) for key in config.get(name))
