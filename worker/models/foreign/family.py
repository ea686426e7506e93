"""Family: a row of the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE, WeightMap


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the registry. `read` turns a config of this `model_type` into a spec."""

    model_type: str
    architectures: tuple[str, ...]
    """The names that `architectures` in config.json may have."""
    read: Callable[[ForeignConfig], ModelSpec]
    other_types: tuple[str, ...] = ()
    """Model types whose configs are of this one but for their name."""
    gguf_architectures: tuple[str, ...] = ()
    weights: WeightMap = DENSE
    inside: tuple[str, ...] = ()
    """Model types whose `text_config` is a config of this family: models of images and text, served for text alone."""
    skipped: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are not read: those of images, of audio, of draft layers."""
    ignored: tuple[str, ...] = ()
    """Endings of the names of tensors that are not read: tables that are computed anyway."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """A key of the family's configs → the usual key that it stands for, where that is not given."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config does not have, as transformers' class has them."""
    gguf_keys: Mapping[str, str] = field(default_factory=dict)
    """A key of GGUF metadata behind the architecture's name → the family's key in config.json. Keys that change the
    computation and that a family does not name here are refused."""
    gguf_values: Mapping[str, Any] = field(default_factory=dict)
    """What GGUF files do not say, because every model of the family has it so."""
    is_gguf_with_experts: bool = False
    """GGUF files of its architectures are of this family if they have experts, and else of another one."""
    has_draft_layers: bool = False
    """Checkpoints may have layers behind the last one, which draft tokens and are not read."""
    has_latents: bool = False
    """Whether its attention is over latents: GGUF files say the sizes of heads by other keys."""
    turns_part: bool = False
    """Whether the rotary embedding may turn a part of each head: `read_rotary` is given the head size then."""
