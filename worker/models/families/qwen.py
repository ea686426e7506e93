"""Qwen 1: Qwen 2 with a rotary base that grows with the prompt, and queries that grow behind the trained context."""

from __future__ import annotations

from dataclasses import replace

from allspan.protos.model_files.json_values import shown
from allspan.worker.models.blocks.gated_mlp import GatedMlp
from allspan.worker.models.blocks.position_scores import QueryScale
from allspan.worker.models.foreign.common import alike, model_spec, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE, Entry

_TRAINED = 8192
"""Tokens, when the config does not say: as the vendor's code has it."""


def _read(config: ForeignConfig) -> ModelSpec:
    """`use_dynamic_ntk` and `use_logn_attn` are on unless a config says otherwise; GGUF files have neither."""
    _refuse_others(config)
    trained, biases = config.size("seq_length", _TRAINED), not config.flag("no_bias", True)
    context = max(trained, config.size("max_position_embeddings", trained))
    rotary, scale = read_rotary(config, trained), None
    if config.flag("use_dynamic_ntk", True):
        rotary = replace(rotary, kind="by_prompt", original_max_position_embeddings=trained)
    if config.flag("use_logn_attn", True):
        scale = QueryScale("log", trained)
    attention = read_gqa(config, rotary, qkv_bias=True, output_bias=biases, query_scale=scale)
    return model_spec(config, "qwen", alike(config, attention, _read_mlp(config, biases)), context)


def _read_mlp(config: ForeignConfig, bias: bool) -> GatedMlp:
    """`intermediate_size` counts the columns of gate and up together."""
    both = read_gated_mlp(config, bias)
    if both.intermediate_size % 2:
        raise config.error(f"intermediate_size {both.intermediate_size} is odd: gate and up have half of it each")
    return replace(both, intermediate_size=both.intermediate_size // 2)


def _refuse_others(config: ForeignConfig) -> None:
    """Raises CheckpointError for models of this type that compute otherwise."""
    if config.flag("apply_residual_connection_post_layernorm"):
        raise config.error("apply_residual_connection_post_layernorm true is not supported (supported: false)")
    if config.get("visual"):
        raise config.error("visual: models of images and text are not supported: use the model of text alone")
    if config.number("rotary_pct", 1.0) != 1.0:
        raise config.error(f"rotary_pct {shown(config.get('rotary_pct'))} is not supported (supported: 1.0)")
    heads, kv_heads = config.size("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise config.error(f"num_key_value_heads {shown(kv_heads)} is not supported (supported: {heads}, as of q)")


_LAYER = "transformer.h.{i}."

QWEN = Family(
    "qwen",
    ("QWenLMHeadModel",),
    _read,
    gguf_architectures=("qwen",),
    weights=DENSE.with_entries(
        Entry("embedding", "transformer.wte", "token_embd"),
        Entry("norm", "transformer.ln_f", "output_norm"),
        Entry("layers.{i}.input_norm", _LAYER + "ln_1", "blk.{i}.attn_norm"),
        *(Entry(f"layers.{{i}}.{x}", _LAYER + "attn.c_attn", f"blk.{{i}}.attn_{x}") for x in "qkv"),
        Entry("layers.{i}.o", _LAYER + "attn.c_proj", "blk.{i}.attn_output"),
        Entry("layers.{i}.mlp_norm", _LAYER + "ln_2", "blk.{i}.ffn_norm"),
        Entry("layers.{i}.gate", _LAYER + "mlp.w2", "blk.{i}.ffn_gate"),
        Entry("layers.{i}.up", _LAYER + "mlp.w1", "blk.{i}.ffn_up"),
        Entry("layers.{i}.down", _LAYER + "mlp.c_proj", "blk.{i}.ffn_down"),
    ),
    ignored=(".attn.bias", ".attn.masked_bias"),
    renamed={
        "layer_norm_epsilon": "rms_norm_eps",
        "kv_channels": "head_dim",
        "rotary_emb_base": "rope_theta",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "ffn_hidden_size": "intermediate_size",
        "padded_vocab_size": "vocab_size",
    },
    gguf_values={"use_dynamic_ntk": False, "use_logn_attn": False},
)
