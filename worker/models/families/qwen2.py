"""Qwen 1.5, 2 and 2.5 dense: Llama with biases on q, k and v."""

from __future__ import annotations

from allspan.worker.models.families.common import (
    Family,
    alike,
    model_spec,
    read_context,
    read_gated_mlp,
    read_gqa,
    read_rotary,
    sliding_window,
)
from allspan.worker.models.families.foreign_config import ForeignConfig
from allspan.worker.models.spec import ModelSpec

CONTEXT = 32768
"""Tokens, when the config gives none."""


def _read(config: ForeignConfig) -> ModelSpec:
    rotary = read_rotary(config, CONTEXT)
    layers = alike(config, read_gqa(config, rotary, qkv_bias=True), read_gated_mlp(config))
    return model_spec(config, "qwen2", layers, read_context(config, rotary, CONTEXT, qwen_window(config)))


def qwen_window(config: ForeignConfig) -> int:
    """Qwen's window is off unless `use_sliding_window`, and then for the layers from `max_window_layers` on."""
    if not config.flag("use_sliding_window"):
        return 0
    if config.has("sliding_window") and config.get("sliding_window") is None:
        return 0
    window = config.size("sliding_window", 4096)
    if config.get("layer_types") is not None:
        return sliding_window(config, window)
    first = config.get("max_window_layers")
    if first is not None and not isinstance(first, int):
        raise config.error(f"max_window_layers must be an integer, got {first!r}")
    return window if (28 if first is None else first) < config.size("num_hidden_layers") else 0


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read, gguf_architectures=("qwen2",))
