"""Llama 2 and 3, and what took its shape unchanged."""

from __future__ import annotations

from allspan.worker.models.foreign.common import alike, model_spec, read_context, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import read_windows
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE

_CONTEXT = 2048
_GGUF_WINDOW = "gguf_sliding_window"
"""GGUF's window: its architecture "llama" may be a Mistral. transformers' Llama has none, whatever its config says."""


def _read(config: ForeignConfig) -> ModelSpec:
    bias, rotary = config.flag("attention_bias"), read_rotary(config, _CONTEXT)
    attention = read_gqa(config, rotary, qkv_bias=bias, output_bias=bias)
    window = config.size(_GGUF_WINDOW) if config.get(_GGUF_WINDOW) else 0
    mlp, context = read_gated_mlp(config, config.flag("mlp_bias")), read_context(config, rotary, _CONTEXT)
    layers = alike(config, attention, mlp, read_windows(config, context, window))
    return model_spec(config, "llama", layers, context)


LLAMA = Family(
    "llama",
    ("LlamaForCausalLM", "LlamaModel"),
    _read,
    gguf_architectures=("llama",),
    weights=DENSE.with_entries(interleaved=("gguf",)),
)
