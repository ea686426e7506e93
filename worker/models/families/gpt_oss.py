"""gpt-oss: a window in every other layer, sinks, and experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allspan.protos.model_files.json_values import shown
from allspan.worker.models.blocks.moe import Moe
from allspan.worker.models.foreign.common import alike, model_spec, read_context, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.experts import EXPERT_GGUF_KEYS, read_num_experts, read_router
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import FULL, SLIDING, read_window, read_windows
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE, Entry, Foreign, Spelling, in_layer

_CONTEXT = 131072
_HEAD_DIM = 64
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""What the activation clamped_swiglu is made of."""
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
    "rope_theta": 150000.0,
}
"""The rotary embedding of configs that have none."""


def _read(config: ForeignConfig) -> ModelSpec:
    config = _completed(config)
    rotary = read_rotary(config, _CONTEXT)
    context = read_context(config, rotary, _CONTEXT)
    bias = config.flag("attention_bias", True)
    attention = read_gqa(config, rotary, _HEAD_DIM, qkv_bias=bias, output_bias=bias, has_sinks=True)
    for key, value in _SWIGLU.items():
        if config.number(key, value) != value:
            raise config.error(f"{key} {shown(config.get(key))} is not supported (supported: {value})")
    experts = Moe(
        read_num_experts(config),
        config.size("intermediate_size"),
        read_router(config, "softmax_of_chosen"),
        activation="clamped_swiglu",
        has_router_bias=True,
        has_bias=True,
    )
    windows = read_windows(config, context, read_window(config))
    spec = model_spec(config, "gpt_oss", alike(config, attention, experts, windows), context)
    return replace(spec, leaves_float16=True)


def _completed(config: ForeignConfig) -> ForeignConfig:
    """With what GGUF files and short configs leave out: the kinds of layers, and the rotary embedding."""
    scaling = config.section("rope_scaling") or config.section("rope_parameters")
    kinds = [FULL if layer % 2 else SLIDING for layer in range(config.size("num_hidden_layers"))]
    changes: dict[str, Any] = {} if config.get("layer_types") is not None else {"layer_types": kinds}
    if not config.has("gguf_sliding_window"):
        return config.changed(changes | ({"rope_parameters": _ROPE} if scaling is None else {}))
    if scaling is not None:
        changes["rope_scaling"] = {**config.get("rope_scaling"), "truncate": False}
    changes["eos_token_id"] = config.token_ids("eos_token_id")[:1]  # a file may name the end of a message, too
    return config.changed(changes)


def _entries(ending: str = "", is_transposed: bool = True) -> tuple[Entry, ...]:
    """Gate and up are one tensor in Hugging Face's folders, row by row in turn."""
    stem = "model.layers.{i}.mlp.experts."
    up, down = (
        Foreign(stem + name + ending, 0.0, False, f"{stem}{name}_bias", is_transposed, alternates=name[0] == "g")
        for name in ("gate_up_proj", "down_proj")
    )
    theirs = {"expert_gate": up, "expert_up": up, "expert_down": down}
    gguf = {name: f"blk.{{i}}.ffn_{name.removeprefix('expert_')}_exps" for name in theirs}
    return tuple(Entry("layers.{i}." + name, foreign, gguf[name]) for name, foreign in theirs.items())


GPT_OSS = Family(
    "gpt_oss",
    ("GptOssForCausalLM", "GptOssModel"),
    _read,
    gguf_architectures=("gpt-oss",),
    weights=DENSE.with_entries(
        *_entries(),
        *in_layer(router=("mlp.router", "ffn_gate_inp"), mlp_norm=("post_attention_layernorm", "post_attention_norm")),
        spellings=[Spelling("hugging_face", _entries("_blocks", is_transposed=False))],
    ),
    gguf_keys=EXPERT_GGUF_KEYS | {"expert_feed_forward_length": "intermediate_size"},
    renamed={"num_local_experts": "num_experts"},
    defaults={
        "rms_norm_eps": 1e-5,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_theta": 150000.0,
    },
)
