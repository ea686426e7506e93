"""Phi-3, 3.5 and 4: Llama with q, k and v in one tensor, gate and up in another, and longrope."""

from __future__ import annotations

from allspan.worker.models.foreign.common import alike, head_size, model_spec, read_context, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import read_window, read_windows
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE, in_layer

_CONTEXT = 4096


def _read(config: ForeignConfig) -> ModelSpec:
    rotary = read_rotary(config, _CONTEXT, head_size(config))
    context = read_context(config, rotary, _CONTEXT)
    bias = config.flag("attention_bias")
    windows = read_windows(config, context, read_window(config))
    layers = alike(config, read_gqa(config, rotary, qkv_bias=bias), read_gated_mlp(config), windows)
    return model_spec(config, "phi3", layers, context)


PHI3 = Family(
    "phi3",
    ("Phi3ForCausalLM", "Phi3Model"),
    _read,
    gguf_architectures=("phi3",),
    weights=DENSE.with_entries(
        *in_layer(
            q=("self_attn.qkv_proj", "attn_qkv"),
            k=("self_attn.qkv_proj", "attn_qkv"),
            v=("self_attn.qkv_proj", "attn_qkv"),
            gate=("mlp.gate_up_proj", "ffn_up"),
            up=("mlp.gate_up_proj", "ffn_up"),
        )
    ),
    defaults={"rms_norm_eps": 1e-5},
    turns_part=True,
)
