"""Gemma 1, 2 and 3 (text): norms that are stored as their distance from 1, embeddings scaled by √H, GELU; from Gemma 2
on norms on both sides of a block, and windows.

Gemma 2 and 3 hold the residual stream divided by √H, which spares scaling the embedding: what blocks add is divided in
the norms behind them, and norms of the stream have eps / H. That is exact but for float32's rounding."""

from __future__ import annotations

from dataclasses import replace

from allspan.worker.models.foreign.common import alike, head_size, model_spec, read_context, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import FULL, SLIDING, read_pattern
from allspan.worker.models.rope import RotarySpec
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms, NormSpec
from allspan.worker.weights.weight_map import DENSE, Entry, Foreign, in_layer

_LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the model with 27 billion parameters, whose queries are scaled by another number. GGUF files do not say."""


def _gemma(config: ForeignConfig) -> ModelSpec:
    """Gemma 1. Its "gelu" was trained as gelu_pytorch_tanh."""
    if config.text("hidden_activation") == "":
        config = config.changed({"hidden_act": "gelu_pytorch_tanh"})
    bias, rotary = config.flag("attention_bias"), read_rotary(config, 8192)
    context, root = read_context(config, rotary, 8192), config.size("hidden_size") ** 0.5
    attention = read_gqa(config, rotary, qkv_bias=bias, output_bias=bias)
    eps = config.number("rms_norm_eps")
    spec = model_spec(config, "gemma", alike(config, attention, read_gated_mlp(config)), context, NormSpec(eps))
    norm = NormSpec(eps, 1 / root if spec.tie_word_embeddings else 1.0)  # of the head, which is as large then
    return replace(spec, norm=norm, embedding_scale=root, leaves_float16=True)


def _read(config: ForeignConfig, family: str, rotaries: dict[str, RotarySpec], qk_norm_eps: float) -> ModelSpec:
    kinds, bias = read_pattern(config, "sliding_window_pattern"), config.flag("attention_bias")
    context = read_context(config, rotaries[FULL], config.size("max_position_embeddings"))
    window = config.size("sliding_window") if config.get("sliding_window") else 0
    eps, hidden = config.number("rms_norm_eps"), config.size("hidden_size")
    norm, mlp = NormSpec(eps / hidden), read_gated_mlp(config)
    norms = Norms(norm, NormSpec(eps, hidden**-0.5))
    layers = {
        kind: LayerSpec(
            read_gqa(
                config,
                rotary,
                qkv_bias=bias,
                output_bias=bias,
                qk_norm_eps=qk_norm_eps,
                window=window if kind == SLIDING and window < context else 0,
                soft_cap=_cap(config, "attn_logit_softcapping"),
                scale=_query_scalar(config, family) ** -0.5,
            ),
            mlp,
            norms,
            norms,
        )
        for kind, rotary in rotaries.items()
    }
    spec = model_spec(config, family, [layers[kind] for kind in kinds], context, norm)
    return replace(spec, final_soft_cap=_cap(config, "final_logit_softcapping"), leaves_float16=True)


def _gemma2(config: ForeignConfig) -> ModelSpec:
    rotary = read_rotary(config, 8192)
    return _read(config, "gemma2", {FULL: rotary, SLIDING: rotary}, 0.0)


def _gemma3(config: ForeignConfig) -> ModelSpec:
    """Layers with a window have another base, and no scaling."""
    local, context = config.number("rope_local_base_freq", 1e4), 131072
    parameters = config.section("rope_parameters")
    if parameters is not None and (parameters.section(FULL) or parameters.section(SLIDING)):
        full = read_rotary(config, context, layer_kind=FULL)
        sliding = read_rotary(config.changed({"rope_theta": local}), context, layer_kind=SLIDING)
    else:
        full, sliding = read_rotary(config, context), RotarySpec(local)
    return _read(config, "gemma3_text", {FULL: full, SLIDING: sliding}, config.number("rms_norm_eps"))


def _cap(config: ForeignConfig, key: str) -> float:
    return config.number(key) if config.get(key) else 0.0


def _query_scalar(config: ForeignConfig, family: str) -> float:
    """The number whose inverse root scales queries; of a GGUF file as llama.cpp has it."""
    if config.get("query_pre_attn_scalar") is not None:
        return config.number("query_pre_attn_scalar")
    if config.size("num_hidden_layers") == _LARGEST[family]:
        return config.size("hidden_size") / config.size("num_attention_heads")
    return float(head_size(config))


_SHIFTED = (
    Entry("norm", Foreign("model.norm", 1.0), "output_norm"),
    *in_layer(1.0, input_norm=("input_layernorm", "attn_norm")),
)
_SANDWICH = DENSE.with_entries(
    *_SHIFTED,
    *in_layer(
        1.0,
        attention_output_norm=("post_attention_layernorm", "post_attention_norm"),
        mlp_norm=("pre_feedforward_layernorm", "ffn_norm"),
        mlp_output_norm=("post_feedforward_layernorm", "post_ffw_norm"),
        q_norm=("self_attn.q_norm", "attn_q_norm"),
        k_norm=("self_attn.k_norm", "attn_k_norm"),
    ),
)
_OF_ALL = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_activation": "gelu_pytorch_tanh",
}
_OF_BOTH = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
} | _OF_ALL
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GGUF_CAPS = {name: name for name in _CAPS}
_NOT_IN_GGUF = {"query_pre_attn_scalar": None, "rope_theta": 1e4, "hidden_activation": "gelu_pytorch_tanh"}
_GGUF_PATTERN = {"attention.sliding_window_pattern": "sliding_window_pattern"}

GEMMA = Family(
    "gemma",
    ("GemmaForCausalLM", "GemmaModel"),
    _gemma,
    gguf_architectures=("gemma",),
    weights=DENSE.with_entries(*_SHIFTED, *in_layer(1.0, mlp_norm=("post_attention_layernorm", "ffn_norm"))),
    defaults={name: value for name, value in _OF_ALL.items() if name != "hidden_activation"},
    gguf_values={"rms_norm_eps": 1e-6},
)
GEMMA2 = Family(
    "gemma2",
    ("Gemma2ForCausalLM", "Gemma2Model"),
    _gemma2,
    gguf_architectures=("gemma2",),
    weights=_SANDWICH,
    defaults=_OF_BOTH | _CAPS | {"vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window_pattern": 2},
    gguf_keys=_GGUF_CAPS | _GGUF_PATTERN,
    gguf_values=_CAPS | _NOT_IN_GGUF | {"sliding_window": 4096, "sliding_window_pattern": 2},
)
GEMMA3 = Family(
    "gemma3_text",
    ("Gemma3ForCausalLM", "Gemma3TextModel"),
    _gemma3,
    gguf_architectures=("gemma3",),
    weights=_SANDWICH,
    inside=("gemma3",),
    skipped=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    renamed={"_sliding_window_pattern": "sliding_window_pattern"},
    defaults=_OF_BOTH | {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6},
    gguf_keys=_GGUF_CAPS | _GGUF_PATTERN | {"rope.freq_base_swa": "rope_local_base_freq"},
    gguf_values=_NOT_IN_GGUF | {"sliding_window": 0},
)
