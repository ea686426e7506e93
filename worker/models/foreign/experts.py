"""Mixtures of experts as configs describe them, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Collection

from allspan.kernels.router_spec import RouterSpec
from allspan.protos.model_files.json_values import shown
from allspan.worker.models.blocks.base import MlpBlock
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.weights.weight_map import Entry, Foreign, Spelling

MOST_EXPERTS = 1 << 12
"""The most that a layer may have; known models have up to 512."""
EXPERT_GGUF_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_gating_func": "gguf_gating",
    "leading_dense_block_count": "first_k_dense_replace",
}
"""A key of GGUF metadata → that in config.json: see `allspan.worker.models.foreign.family.Family.gguf_keys`."""
_LAYER_TYPES = ("dense", "sparse")
_GATING = {"softmax": 1, "sigmoid": 2, "softmax_of_chosen": 3}
"""A score (`RouterSpec.score`) → its number in GGUF metadata."""


def read_num_experts(config: ForeignConfig) -> int:
    """The experts of a layer, under the usual key `num_experts`."""
    return config.size("num_experts", most=MOST_EXPERTS)


def read_router(
    config: ForeignConfig, score: str = "softmax", normalises: bool = False, epsilon: float = 0.0
) -> RouterSpec:
    """Raises CheckpointError for more choices than experts, for groups that are not equal, and for another score than
    the family has."""
    gating = config.get("gguf_gating")
    if gating not in (None, 0, _GATING[score]):
        raise config.error(
            f"expert_gating_func {shown(gating)} is not supported (supported: {_GATING[score]}, {score})"
        )
    experts, top_k = read_num_experts(config), config.size("num_experts_per_tok")
    groups, kept = config.size("n_group", 1), config.size("topk_group", 1)
    if top_k > experts:
        raise config.error(f"num_experts_per_tok is {top_k}, must be at most the {experts} experts of a layer")
    if experts % groups or kept > groups or kept * (experts // groups) < top_k:
        raise config.error(
            f"n_group {groups} and topk_group {kept} must be equal groups of {experts} experts, and those kept have at "
            f"least the {top_k} that a token goes to"
        )
    scale = config.number("routed_scaling_factor", 1.0)
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


def expert_spellings(mlp: str = "mlp.") -> tuple[Spelling, ...]:
    """Names of experts that lie in one tensor a layer, gate above up, as transformers has them in memory, and as newer
    and older GGUF files have them: `mlp` is Hugging Face's name of the block that has them."""
    stem, gguf = "model.layers.{i}." + mlp + "experts.", "blk.{i}."

    def entry(name: str, theirs: Foreign, ours: str) -> Entry:
        return Entry("layers.{i}." + name, theirs, gguf + ours)

    made: list[Spelling] = []
    for has_suffix in (False, True):
        both = Foreign(stem + "gate_up_proj", has_suffix=has_suffix)
        pair = entry("expert_gate", both, "ffn_gate_exps"), entry("expert_up", both, "ffn_up_exps")
        down = entry("expert_down", Foreign(stem + "down_proj", has_suffix=has_suffix), "ffn_down_exps")
        made += [Spelling("hugging_face", pair), Spelling("hugging_face", (down,))]
    own = {role: Foreign(f"{stem}{{e}}.{role}_proj") for role in ("gate", "up", "down")}
    fused = (entry(f"expert_{role}", own[role], "ffn_gate_up_exps") for role in ("gate", "up"))
    split = (entry(f"expert_{role}", theirs, f"ffn_{role}.{{e}}") for role, theirs in own.items())
    return (*made, Spelling("gguf", tuple(fused)), Spelling("gguf", tuple(split)))


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
