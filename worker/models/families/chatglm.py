"""ChatGLM2, ChatGLM3 and GLM-4-9B in their own layout: Llama with biases on q, k and v, and half of a head turned."""

from __future__ import annotations

from dataclasses import replace

from allspan.protos.model_files.json_values import shown
from allspan.worker.models.foreign.common import alike, head_size, model_spec, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.rope import RotarySpec
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE, Entry

_FIRST = ("position_encoding_2d", "inner_hidden_size", "max_sequence_length")
"""Keys of the first ChatGLM-6B."""
_NAME = "_name_or_path"
_LAYERS_6B, _CONTEXT_32K = 28, 32768


def _read(config: ForeignConfig) -> ModelSpec:
    _refuse_others(config)
    all_biases, has_bias = config.flag("add_bias_linear"), config.flag("attention_bias")
    rotary, context = _read_rotary(config), config.size("max_position_embeddings")
    attention = read_gqa(config, rotary, qkv_bias=has_bias or all_biases, output_bias=all_biases)
    return model_spec(config, "chatglm", alike(config, attention, read_gated_mlp(config, all_biases)), context)


def _read_rotary(config: ForeignConfig) -> RotarySpec:
    """The base grows with `rope_ratio`; in ChatGLM2-6B-32K, positions are divided by it instead. Only the model's name
    tells that one from ChatGLM3-6B-32K."""
    ratio, name = config.number("rope_ratio", 1.0), config.text(_NAME).lower()
    is_divided = ratio != 1.0 and "chatglm2" in name
    layers, context = config.size("num_hidden_layers"), config.size("max_position_embeddings")
    if ratio != 1.0 and "glm" not in name and (layers, context) == (_LAYERS_6B, _CONTEXT_32K):
        raise config.error(
            f"rope_ratio {ratio:g} divides positions in ChatGLM2-6B-32K and scales the base in ChatGLM3-6B-32K, and "
            f"{_NAME} {shown(config.get(_NAME))} does not say which this is: start with --hf-overrides "
            f'\'{{"{_NAME}": "chatglm3-6b-32k"}}\', or with chatglm2-6b-32k there'
        )
    rotary = read_rotary(config, context, head_size(config))
    if is_divided:
        return replace(rotary, kind="linear", factor=ratio)
    return replace(rotary, theta=rotary.theta * ratio)


def _refuse_others(config: ForeignConfig) -> None:
    """Raises CheckpointError for models of this type that compute otherwise."""
    if any(config.get(key) for key in _FIRST):
        raise config.error(
            "the first ChatGLM-6B is not supported (two-dimensional positions, bidirectional prompts): use "
            "ChatGLM2-6B, ChatGLM3-6B or GLM-4-9B"
        )
    if config.get("vision_config"):
        raise config.error("vision_config: models of images and text are not supported: use the model of text alone")
    if bits := config.get("quantization_bit"):
        raise config.error(
            f"quantization_bit {shown(bits)}: this packing of weights is not supported: take the model that is not "
            "quantised, and quantise it with --quantization int8 or uint4"
        )
    if config.get("pre_seq_len"):
        raise config.error(f"pre_seq_len {shown(config.get('pre_seq_len'))}: prefix tuning is not supported")
    for key, wanted, default in (
        ("multi_query_attention", True, False),
        ("rmsnorm", True, True),
        ("post_layer_norm", True, True),
        ("original_rope", True, True),
        ("apply_residual_connection_post_layernorm", False, False),
        ("interleaved_qkv", False, False),
    ):
        if config.flag(key, default) is not wanted:
            said, known = (str(value).lower() for value in (not wanted, wanted))
            raise config.error(f"{key} {said} is not supported (supported: {known})")


_LAYER = "transformer.encoder.layers.{i}."
_QKV, _GATE_UP = _LAYER + "self_attention.query_key_value", _LAYER + "mlp.dense_h_to_4h"

CHATGLM = Family(
    "chatglm",
    ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    _read,
    gguf_architectures=("chatglm",),
    weights=DENSE.with_entries(
        Entry("embedding", "transformer.embedding.word_embeddings", "token_embd"),
        Entry("norm", "transformer.encoder.final_layernorm", "output_norm"),
        Entry("lm_head", "transformer.output_layer", "output"),
        Entry("layers.{i}.input_norm", _LAYER + "input_layernorm", "blk.{i}.attn_norm"),
        Entry("layers.{i}.q", _QKV, "blk.{i}.attn_q"),
        Entry("layers.{i}.k", _QKV, "blk.{i}.attn_k"),
        Entry("layers.{i}.v", _QKV, "blk.{i}.attn_v"),
        Entry("layers.{i}.o", _LAYER + "self_attention.dense", "blk.{i}.attn_output"),
        Entry("layers.{i}.mlp_norm", _LAYER + "post_attention_layernorm", "blk.{i}.ffn_norm"),
        Entry("layers.{i}.gate", _GATE_UP, "blk.{i}.ffn_gate"),
        Entry("layers.{i}.up", _GATE_UP, "blk.{i}.ffn_up"),
        Entry("layers.{i}.down", _LAYER + "mlp.dense_4h_to_h", "blk.{i}.ffn_down"),
        interleaved=("hugging_face", "gguf"),
    ),
    ignored=("rotary_pos_emb.inv_freq",),
    renamed={
        "num_layers": "num_hidden_layers",
        "multi_query_group_num": "num_key_value_heads",
        "kv_channels": "head_dim",
        "ffn_hidden_size": "intermediate_size",
        "layernorm_epsilon": "rms_norm_eps",
        "padded_vocab_size": "vocab_size",
        "seq_length": "max_position_embeddings",
        "add_qkv_bias": "attention_bias",
    },
    defaults={"partial_rotary_factor": 0.5},
    gguf_values={"multi_query_attention": True},
    turns_part=True,
)
