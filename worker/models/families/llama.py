"""Llama 2 and 3, and what took its shape unchanged."""

from __future__ import annotations

from allspan.worker.load.foreign import ForeignConfig
from allspan.worker.models.families.common import Family, Features, dense_spec, sliding_window
from allspan.worker.models.spec import ModelSpec


def _read(config: ForeignConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    features = Features(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        sliding_window=config.size("sliding_window") if config.get("sliding_window") else 0,
    )
    return dense_spec(config, "llama", features)


def _read_mistral(config: ForeignConfig) -> ModelSpec:
    """Llama with a sliding window, which transformers takes as 4096 tokens when the config does not speak of it."""
    is_off = config.has("sliding_window") and not config.get("sliding_window")
    window = 0 if is_off else config.size("sliding_window", 4096)
    features = Features(max_position_embeddings=131072, sliding_window=sliding_window(config, window))
    if config.get("num_key_value_heads") is None:
        raise config.error("num_key_value_heads is missing")
    return dense_spec(config, "mistral", features)


LLAMA = Family("llama", "LlamaForCausalLM", _read, gguf_architectures=("llama",))
MISTRAL = Family("mistral", "MistralForCausalLM", _read_mistral)
