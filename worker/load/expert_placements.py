"""Which group of ranks holds which experts of each layer, as the configuration and a file of loads say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import ModelConfig
from allspan.worker.models.blocks.moe import Moe
from allspan.worker.models.placement import Placement, balanced, numbered
from allspan.worker.models.spec import ModelSpec

_OF_WHOLE_EXPERTS: dict[str, Any] = {
    "expert_parallel_size": 0,
    "redundant_experts": 0,
    "expert_nodes": 1,
    "expert_load": "",
    "rebalance_experts_s": 0.0,
}
"""The settings that say something only of ranks with whole experts, and their defaults."""
ONE_RANK: dict[str, Any] = {"enable_expert_parallel": False, **_OF_WHOLE_EXPERTS}
"""What one rank alone has of the settings."""


def mixtures(spec: ModelSpec) -> dict[int, Moe]:
    """The layers with experts, by number."""
    return {number: layer.mlp for number, layer in enumerate(spec.layers) if isinstance(layer.mlp, Moe)}


def expert_groups(config: ModelConfig, spec: ModelSpec, size: int) -> int:
    """See `make_shard`. Raises ConfigError for groups that are not equal, or more than there are experts."""
    if not config.enable_expert_parallel:
        for name, default in _OF_WHOLE_EXPERTS.items():
            if (value := getattr(config, name)) != default:
                raise ConfigError(f"{name} is {value} without --enable-expert-parallel: use both")
        return 1
    counts = [mixture.num_experts for mixture in mixtures(spec).values()]
    if not counts:
        raise ConfigError("enable_expert_parallel: the model has no experts: leave --enable-expert-parallel out")
    groups = config.expert_parallel_size or size
    if size % groups or groups > min(counts):
        raise ConfigError(
            f"expert_parallel_size is {groups}, must divide the {size} ranks and be at most the {min(counts)} experts "
            "of a layer: set another --expert-parallel-size"
        )
    return groups


def placements(config: ModelConfig, spec: ModelSpec, groups: int) -> dict[int, Placement]:
    """Each layer's placement on the groups of ranks; without copies and loads every layer's is `numbered`. Raises
    ConfigError for copies that have no place, and for a file that does not tell the loads of the model's experts."""
    found, copies = mixtures(spec), config.redundant_experts
    most = min((mixture.num_experts * (groups - 1) for mixture in found.values()), default=0)
    if copies > most:
        raise ConfigError(
            f"redundant_experts is {copies}, must be at most {most}: one of {groups} groups of ranks holds an expert "
            "once; set a lower --redundant-experts"
        )
    if not config.expert_load:
        return {number: numbered(mixture.num_experts, groups, copies) for number, mixture in found.items()}
    loads = read_loads(config.expert_load)
    for number, mixture in found.items():
        if len(loads.get(number, ())) != mixture.num_experts:
            raise ConfigError(
                f"expert_load {config.expert_load}: layer {number} has {len(loads.get(number, ()))} numbers of tokens, "
                f"must have one for each of its {mixture.num_experts} experts: save GET /cluster of this model"
            )
    return {
        number: balanced(loads[number], groups, copies, config.expert_nodes, mixture.router.groups)
        for number, mixture in found.items()
    }


def read_loads(path: str) -> dict[int, tuple[int, ...]]:
    """Layer → tokens of each expert, from what `GET /cluster` has answered, or its "experts" alone. Raises
    ConfigError."""
    try:
        told: Any = json.loads(Path(path).read_text())
        layers = told["experts"] if isinstance(told, dict) else told
        loads = {int(layer["layer"]): tuple(layer["tokens"]) for layer in layers}
    except OSError as error:
        raise ConfigError(f"expert_load {path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"expert_load {path}: is not the JSON of GET /cluster with its loads of experts: {error!r}"
        ) from None
    for layer, tokens in loads.items():
        if not all(type(count) in (int, float) and 0 <= count < 2**63 for count in tokens):
            raise ConfigError(f"expert_load {path}: layer {layer} has tokens that are not numbers from 0 on")
    return loads
