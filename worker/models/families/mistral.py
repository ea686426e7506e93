"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from allspan.worker.models.foreign.common import alike, model_spec, read_context, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import read_windows, same_window
from allspan.worker.models.spec import ModelSpec

_CONTEXT = 131072
_WINDOW = 4096
"""Tokens, when the config does not speak of it: as transformers has it."""


def _read(config: ForeignConfig) -> ModelSpec:
    if config.get("num_key_value_heads") is None:
        raise config.error("num_key_value_heads is missing")
    is_off = config.has("sliding_window") and not config.get("sliding_window")
    window = 0 if is_off else config.size("sliding_window", _WINDOW)
    rotary = read_rotary(config, _CONTEXT)
    context = read_context(config, rotary, _CONTEXT)
    windows = read_windows(config, context, window)
    if windows != same_window(config, context, window):  # transformers reads the window alone
        raise config.error("layer_types that differ from sliding_window are not supported: remove layer_types")
    layers = alike(config, read_gqa(config, rotary), read_gated_mlp(config), windows)
    return model_spec(config, "mistral", layers, context)


MISTRAL = Family("mistral", ("MistralForCausalLM", "MistralModel"), _read)
