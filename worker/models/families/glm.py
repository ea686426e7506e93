"""GLM-4 in transformers' layout: `glm` (glm-4-9b-chat-hf) and `glm4` (GLM-4-0414, Z1)."""

from __future__ import annotations

from allspan.worker.models.foreign.common import (
    head_size,
    model_spec,
    read_context,
    read_gated_mlp,
    read_gqa,
    read_norm,
)
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms
from allspan.worker.weights.weight_map import DENSE, in_layer

_CONTEXT = 131072
_DEFAULTS = {
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}
_GATE_UP = in_layer(gate=("mlp.gate_up_proj", "ffn_up"), up=("mlp.gate_up_proj", "ffn_up"))
_PAIRS = ("hugging_face", "gguf")


def _read(config: ForeignConfig, family: str, norms: Norms) -> ModelSpec:
    """Half of each head is turned; q, k and v have biases."""
    rotary = read_rotary(config, _CONTEXT, head_size(config))
    attention = read_gqa(config, rotary, qkv_bias=config.flag("attention_bias"))
    layer = LayerSpec(attention, read_gated_mlp(config), norms, norms)
    layers = [layer] * config.size("num_hidden_layers")
    return model_spec(config, family, layers, read_context(config, rotary, _CONTEXT))


def _glm(config: ForeignConfig) -> ModelSpec:
    return _read(config, "glm", Norms(read_norm(config)))


def _glm4(config: ForeignConfig) -> ModelSpec:
    """Norms on both sides of each block."""
    return _read(config, "glm4", Norms(read_norm(config), read_norm(config)))


GLM = Family(
    "glm",
    ("GlmForCausalLM", "GlmModel"),
    _glm,
    weights=DENSE.with_entries(*_GATE_UP, interleaved=_PAIRS),
    defaults=_DEFAULTS,
    turns_part=True,
)

GLM4 = Family(
    "glm4",
    ("Glm4ForCausalLM", "Glm4Model"),
    _glm4,
    gguf_architectures=("glm4",),
    weights=DENSE.with_entries(
        *_GATE_UP,
        *in_layer(
            attention_output_norm=("post_self_attn_layernorm", "post_attention_norm"),
            mlp_output_norm=("post_mlp_layernorm", "post_ffw_norm"),
        ),
        interleaved=_PAIRS,
    ),
    defaults=_DEFAULTS,
    turns_part=True,
)
