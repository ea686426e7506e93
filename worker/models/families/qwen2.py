"""Qwen 1.5, 2 and 2.5 dense: Llama with biases on q, k and v."""

from __future__ import annotations

from allspan.worker.models.foreign.common import alike, model_spec, read_context, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import read_windows
from allspan.worker.models.spec import ModelSpec

CONTEXT = 32768
"""Tokens, when the config gives none."""


def _read(config: ForeignConfig) -> ModelSpec:
    rotary = read_rotary(config, CONTEXT)
    attention, context = read_gqa(config, rotary, qkv_bias=True), read_context(config, rotary, CONTEXT)
    layers = alike(config, attention, read_gated_mlp(config), qwen_windows(config, context))
    return model_spec(config, "qwen2", layers, context)


def qwen_windows(config: ForeignConfig, context: int) -> list[int]:
    """The window of each layer: off unless `use_sliding_window`, and then for the layers from `max_window_layers`
    on."""
    is_off = config.has("sliding_window") and config.get("sliding_window") is None
    if is_off or not config.flag("use_sliding_window"):
        return read_windows(config, context, 0)
    first = config.get("max_window_layers")
    if first is not None and (isinstance(first, bool) or not isinstance(first, int)):
        raise config.error(f"max_window_layers must be an integer, got {first!r}")
    return read_windows(config, context, config.size("sliding_window", 4096), 28 if first is None else first)


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM", "Qwen2Model"), _read, gguf_architectures=("qwen2",))
