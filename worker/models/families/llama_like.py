"""Families that are Llama but for a detail each: SmolLM3, Seed-OSS, ERNIE 4.5 and Helium."""

from __future__ import annotations

from dataclasses import replace

from allspan.protos.model_files.json_values import shown
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.foreign.common import alike, model_spec, read_context, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import read_window, read_windows
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE, in_layer

_PAIRS = ("hugging_face", "gguf")


def _smollm3(config: ForeignConfig) -> ModelSpec:
    """Some layers have no rotary embedding: every `no_rope_layer_interval`th, or those for which `no_rope_layers` has
    0. Only these may have a window."""
    count, interval = config.size("num_hidden_layers"), config.size("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers")
    if turns is None:
        turns = [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(turns, list) or len(turns) < count or any(turn not in (0, 1) for turn in turns):
        raise config.error(f"no_rope_layers must have 0 or 1 for each of {count} layers, got {shown(turns)}")
    rotary, bias = read_rotary(config, 32768), config.flag("attention_bias")
    context = read_context(config, rotary, 32768)
    windows = read_windows(config, context, read_window(config) if config.flag("use_sliding_window") else 0)
    if config.get("layer_types") is None:
        windows = [0 if turn else window for turn, window in zip(turns, windows, strict=False)]
    attention = read_gqa(config, rotary, qkv_bias=bias, output_bias=bias)
    layers = alike(config, attention, read_gated_mlp(config, config.flag("mlp_bias")), windows)
    for number, layer in enumerate(layers):
        if not turns[number] and isinstance(layer.attention, Gqa):
            layers[number] = replace(layer, attention=replace(layer.attention, rotary=None))
    return model_spec(config, "smollm3", layers, context)


def _llama(config: ForeignConfig, family: str, context: int, output_bias: str = "") -> ModelSpec:
    """`output_bias`: the key that says whether o has a bias; without one it has none."""
    rotary = read_rotary(config, context)
    most = read_context(config, rotary, context)
    attention = read_gqa(
        config,
        rotary,
        qkv_bias=config.flag("attention_bias"),
        output_bias=bool(output_bias) and config.flag(output_bias),
    )
    layers = alike(config, attention, read_gated_mlp(config, config.flag("mlp_bias")))
    return model_spec(config, family, layers, most)


def _seed_oss(config: ForeignConfig) -> ModelSpec:
    return _llama(config, "seed_oss", 524288, "attention_out_bias")


def _ernie(config: ForeignConfig) -> ModelSpec:
    """One key for all biases."""
    bias = config.flag("use_bias")
    return _llama(config.changed({"attention_bias": bias, "mlp_bias": bias}), "ernie4_5", 131072, "attention_bias")


def _helium(config: ForeignConfig) -> ModelSpec:
    return _llama(config, "helium", 4096)


SMOLLM3 = Family(
    "smollm3",
    ("SmolLM3ForCausalLM", "SmolLM3Model"),
    _smollm3,
    gguf_architectures=("smollm3",),
    weights=DENSE.with_entries(interleaved=("gguf",)),
    defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4},
)
SEED_OSS = Family(
    "seed_oss",
    ("SeedOssForCausalLM", "SeedOssModel"),
    _seed_oss,
    gguf_architectures=("seed_oss",),
    weights=DENSE.with_entries(*in_layer(mlp_norm=("post_attention_layernorm", "post_attention_norm"))),
    defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
)
ERNIE = Family(
    "ernie4_5",
    ("Ernie4_5ForCausalLM", "Ernie4_5Model"),
    _ernie,
    gguf_architectures=("ernie4_5",),
    weights=DENSE.with_entries(interleaved=_PAIRS),
    defaults={
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    },
)
HELIUM = Family(
    "helium",
    ("HeliumForCausalLM", "HeliumModel"),
    _helium,
    weights=DENSE.with_entries(interleaved=_PAIRS),
    defaults={"rope_theta": 1e5, "head_dim": 128, "rms_norm_eps": 1e-8},
)
