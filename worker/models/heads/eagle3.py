"""EAGLE-3 heads (Li et al., arXiv:2503.01840): one Llama layer whose attention reads a token's embedding beside a state
that is made of three of its target's. Read as the authors, the library speculators and NVIDIA publish them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields

from allspan.protos.model_files.json_values import shown
from allspan.worker.models.blocks.draft_inputs import FusedFeatures, PairGqa
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.foreign.common import model_spec, read_gated_mlp, read_gqa, read_norm
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import FULL
from allspan.worker.models.spec import HeadSpec, LayerSpec, ModelSpec, Norms
from allspan.worker.weights.weight_map import Entry, WeightMap

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NVIDIA = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""What `eagle_config` says of the layer, as every EAGLE-3 head has it."""
_LAYERS = "midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."
"""Beginnings of the names of the layer's tensors, the authors' first."""
_IN_LAYER = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
EMBEDDING = "embedding.weight"
"""The canonical name of the embedding."""
TARGET_IDS = "d2t"
"""The tensor with what is to be added to an id of the head for that of its target."""
SKIPPED = TARGET_IDS, "t2d", "verifier_"
"""Beginnings of the names of tensors that no layer has: maps of vocabularies, and copies that training leaves."""


def eagle3_weights(names: Collection[str]) -> WeightMap:
    """The map for a checkpoint with tensors of these names."""
    layer = next((each for each in _LAYERS if f"{each}hidden_norm.weight" in names), _LAYERS[0])

    def named(name: str) -> str:
        return f"model.{name}" if f"model.{name}.weight" in names else name

    return WeightMap(
        (
            Entry("embedding", named("embed_tokens"), ""),
            Entry("fc", named("fc"), ""),
            Entry("features_norm", named("input_norm"), ""),
            Entry("embedding_norm", layer + "input_layernorm", ""),
            Entry("state_norm", layer + "hidden_norm", ""),
            Entry("norm", named("norm"), ""),
            Entry("lm_head", "lm_head", ""),
            *(Entry("layers.{i}." + name, layer + theirs, "") for name, theirs in _IN_LAYER.items()),
        )
    )


def read_eagle3(config: ForeignConfig, target: ModelSpec, names: Collection[str]) -> HeadSpec:
    """From the config of a head, its target, and the names of its tensors (none: it has random weights). Raises
    CheckpointError for what would not be computed exactly, and for a head of another target."""
    inner, is_nested = config.section("transformer_layer_config"), config.has("speculators_model_type")
    layer, nvidia = inner or config, config.section("eagle_config")
    _refuse(config, layer, nvidia)
    ids = _layer_ids(config if nvidia is None else nvidia, target)
    rotary, norm = read_rotary(layer, target.max_position_embeddings), read_norm(layer)
    bias = layer.flag("attention_bias")
    read = read_gqa(layer, rotary, qkv_bias=bias, output_bias=bias)
    attention = PairGqa(**{field.name: getattr(read, field.name) for field in fields(Gqa)})
    mlp = read_gated_mlp(layer, layer.flag("mlp_bias"))
    layers = (LayerSpec(attention, mlp, Norms(None), Norms(norm)),)
    own = model_spec(layer.changed({"tie_word_embeddings": False}), "eagle3", layers, target.max_position_embeddings)
    weights, vocabulary = eagle3_weights(names), config.size("draft_vocab_size", own.vocab_size)
    has_embedding = weights.foreign(EMBEDDING, "hugging_face") in names
    spec = HeadSpec(
        **{field.name: getattr(own, field.name) for field in fields(ModelSpec)} | {"vocab_size": vocabulary},
        reads=FusedFeatures(
            num_features=len(ids) * target.hidden_size,
            eps=norm.eps,
            keeps_normed=config.flag("norm_before_residual", is_nested),
            norms_features=config.flag("norm_before_fc") or (nvidia is not None and nvidia.flag("norm_before_fc")),
        ),
        features=ids,
        num_embeddings=own.vocab_size if has_embedding else target.vocab_size,
        has_embedding=has_embedding,
        has_head=not names or "lm_head.weight" in names,
        chains_normed=config.flag("norm_output"),
    )
    _check_target(config, spec, target)
    return spec


def _refuse(config: ForeignConfig, layer: ForeignConfig, nvidia: ForeignConfig | None) -> None:
    """Raises CheckpointError for heads that compute otherwise."""
    kind = config.text("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise config.error(f"speculators_model_type {shown(kind)} is not supported (supported: eagle3)")
    if layer.text("model_type", "llama") != "llama":
        raise layer.error(f"model_type {shown(layer.get('model_type'))} is not supported for a head (supported: llama)")
    if layer.size("num_hidden_layers", 1) != 1:
        raise layer.error(
            f"num_hidden_layers {shown(layer.get('num_hidden_layers'))} is not supported for a head (1 is)"
        )
    kinds = layer.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != FULL for kind in kinds):
        raise layer.error(f"layer_types {shown(layer.get('layer_types'))} is not supported for a head ({FULL} is)")
    if config.flag("fc_norm"):
        raise config.error("fc_norm true is not supported (supported: norm_before_fc, one norm of all features)")
    for key, value in _NVIDIA.items():
        if nvidia is not None and nvidia.flag(key, value) is not value:
            raise nvidia.error(f"{key} {json.dumps(not value)} is not supported (supported: {json.dumps(value)})")


def _layer_ids(config: ForeignConfig, target: ModelSpec) -> tuple[int, ...]:
    """The layers of the target in front of which states are taken: by default the authors' three."""
    count, found = len(target.layers), config.get(_LAYER_IDS)
    if found is None:
        found = [2, count // 2, count - 3]
    if not isinstance(found, list) or not found or not all(type(each) is int and 0 <= each < count for each in found):
        raise config.error(f"{_LAYER_IDS} {shown(found)} must be numbers from 0 to {count - 1}, of the target's layers")
    return tuple(found)


def _check_target(config: ForeignConfig, spec: HeadSpec, target: ModelSpec) -> None:
    """Raises CheckpointError for a head of a model with other sizes."""
    wanted = config.get("target_hidden_size")
    if wanted not in (None, target.hidden_size):
        raise config.error(
            f"target_hidden_size is {shown(wanted)}, but the model's hidden_size is {target.hidden_size}"
        )
    lacks = [name for name, has in (("embed_tokens", spec.has_embedding), ("lm_head", spec.has_head)) if not has]
    if lacks and spec.hidden_size != target.hidden_size:
        raise config.error(
            f"hidden_size is {spec.hidden_size}, and the head has no {lacks[0]} of its own; that of the model has "
            f"{target.hidden_size}: it is the head of another model"
        )
    if spec.vocab_size > target.vocab_size or (not spec.has_head and spec.vocab_size != target.vocab_size):
        raise config.error(
            f"draft_vocab_size is {spec.vocab_size}, but the model has {target.vocab_size} ids: it is the head of "
            "another model"
        )
