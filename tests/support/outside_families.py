"""Families that differ from Llama in what a ModelSpec can say, each as one of the project would be written."""

from __future__ import annotations

from allspan.worker.models.foreign.common import model_spec, read_gated_mlp, read_gqa, read_norm
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms, NormSpec
from allspan.worker.weights.weight_map import DENSE, Entry, Foreign

_LAYER = "model.layers.{i}."


def _renamed(offset: float = 0.0, **names: str) -> tuple[Entry, ...]:
    """Canonical names in a layer → Hugging Face's."""
    return tuple(
        Entry("layers.{i}." + name, Foreign(_LAYER + theirs, offset), f"blk.{{i}}.{name}")
        for name, theirs in names.items()
    )


def _context(config: ForeignConfig) -> int:
    return config.size("max_position_embeddings")


def _gemma3(config: ForeignConfig) -> ModelSpec:
    """Two rotary tables, a softmax scale of its own, norms on both sides that are stored as their distance from 1, and
    embeddings times the root of their size: here the residual stream is held divided by that."""
    root, eps = config.size("hidden_size") ** 0.5, read_norm(config).eps
    before, after = NormSpec(eps / root**2), NormSpec(eps, 1 / root)
    norms, scale = Norms(before, after), config.number("query_pre_attn_scalar") ** -0.5
    kinds = {
        kind: read_gqa(config, read_rotary(config, 0, layer_kind=kind), scale=scale, qk_norm_eps=eps)
        for kind in ("full_attention", "sliding_attention")
    }
    mlp = read_gated_mlp(config)
    layers = [LayerSpec(kinds[kind], mlp, norms, norms) for kind in config.get("layer_types")]
    return model_spec(config, "gemma3_text", layers, _context(config), before)


GEMMA3 = Family(
    "gemma3_text",
    ("Gemma3ForCausalLM",),
    _gemma3,
    weights=DENSE.with_entries(
        Entry("norm", Foreign("model.norm", 1.0), "output_norm"),
        *_renamed(
            offset=1.0,
            input_norm="input_layernorm",
            attention_output_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_output_norm="post_feedforward_layernorm",
            q_norm="self_attn.q_norm",
            k_norm="self_attn.k_norm",
        ),
    ),
)


def _exaone4(config: ForeignConfig) -> ModelSpec:
    """Norms only behind each block."""
    norm = read_norm(config)
    norms = Norms(None, norm)
    attention = read_gqa(config, read_rotary(config, 0), qk_norm_eps=norm.eps)
    layers = [LayerSpec(attention, read_gated_mlp(config), norms, norms)] * config.size("num_hidden_layers")
    return model_spec(config, "exaone4", layers, _context(config))


EXAONE4 = Family(
    "exaone4",
    ("Exaone4ForCausalLM",),
    _exaone4,
    weights=DENSE.with_entries(
        *_renamed(attention_output_norm="post_attention_layernorm", mlp_output_norm="post_feedforward_layernorm")
    ),
)

OUTSIDE = {family.model_type: family for family in (GEMMA3, EXAONE4)}
