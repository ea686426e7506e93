"""Mixtures of experts as configs describe them, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Collection

from allspan.kernels.router_spec import RouterSpec
from allspan.protos.model_files.json_values import shown
from allspan.worker.models.blocks.base import MlpBlock
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.weights.weight_map import Entry, Foreign

MOST_EXPERTS = 1 << 12
"""The most that a layer may have; known models have up to 512."""
_LAYER_TYPES = ("dense", "sparse")


def read_num_experts(config: ForeignConfig) -> int:
    """The experts of a layer, under the usual key `num_experts`."""
    count = config.size("num_experts")
    if count > MOST_EXPERTS:
        raise config.error(f"num_experts is {count}, must be at most {MOST_EXPERTS}")
    return count


def read_router(
    config: ForeignConfig, score: str = "softmax", normalises: bool = False, epsilon: float = 0.0, scale: float = 1.0
) -> RouterSpec:
    """Raises CheckpointError for more choices than experts, and for groups that are not equal."""
    experts, top_k = read_num_experts(config), config.size("num_experts_per_tok")
    groups, kept = config.size("n_group", 1), config.size("topk_group", 1)
    if top_k > experts:
        raise config.error(f"num_experts_per_tok is {top_k}, must be at most the {experts} experts of a layer")
    if experts % groups or kept > groups or kept * (experts // groups) < top_k:
        raise config.error(
            f"n_group {groups} and topk_group {kept} must be equal groups of {experts} experts, and those kept have at "
            f"least the {top_k} that a token goes to"
        )
    return RouterSpec(top_k, score, groups, kept, normalises=normalises, epsilon=epsilon, scale=scale)


def mixed(config: ForeignConfig, dense: MlpBlock, sparse: MlpBlock, sparse_layers: Collection[int]) -> list[MlpBlock]:
    """The MLP block of each layer: `sparse` where `mlp_layer_types` says so, or without it for these layers."""
    count, kinds = config.size("num_hidden_layers"), config.get("mlp_layer_types")
    if kinds is None:
        return [sparse if layer in sparse_layers else dense for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) < count or not all(kind in _LAYER_TYPES for kind in kinds):
        known = ", ".join(_LAYER_TYPES)
        raise config.error(f"mlp_layer_types must have one of {known} for each of {count} layers, got {shown(kinds)}")
    return [sparse if kind == "sparse" else dense for kind in kinds[:count]]


def expert_entries(
    mlp: str = "mlp.",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    router: str = "gate",
) -> tuple[Entry, ...]:
    """The usual names of experts, each of which has tensors of its own in Hugging Face's folders: `mlp`, `router` and
    so on are Hugging Face's names."""
    layer = "model.layers.{i}." + mlp
    names = {
        "router": (Foreign(layer + router), "ffn_gate_inp"),
        "router_bias": (Foreign(layer + router + ".e_score_correction_bias", has_suffix=False), "exp_probs_b.bias"),
        "expert_gate": (Foreign(f"{layer}experts.{{e}}.{gate}"), "ffn_gate_exps"),
        "expert_up": (Foreign(f"{layer}experts.{{e}}.{up}"), "ffn_up_exps"),
        "expert_down": (Foreign(f"{layer}experts.{{e}}.{down}"), "ffn_down_exps"),
    }
    return tuple(
        Entry(
            "layers.{i}." + name,
            theirs,
            Foreign("blk.{i}." + gguf, has_suffix=theirs.has_suffix),
        )
        for name, (theirs, gguf) in names.items()
    )


def shared_entries(shared: str) -> tuple[Entry, ...]:
    """The usual names of the shared expert: `shared` is Hugging Face's, "mlp.shared_expert"."""
    layer = "model.layers.{i}."
    names = {
        "shared_gate": (f"{shared}.gate_proj", "ffn_gate_shexp"),
        "shared_up": (f"{shared}.up_proj", "ffn_up_shexp"),
        "shared_down": (f"{shared}.down_proj", "ffn_down_shexp"),
        "shared_scale": (f"{shared}_gate", "ffn_gate_inp_shexp"),
    }
    return tuple(
        Entry("layers.{i}." + name, layer + theirs, "blk.{i}." + gguf) for name, (theirs, gguf) in names.items()
    )
