"""Qwen3 dense: q and k are normalised head by head, and the head size is its own number."""

from __future__ import annotations

from allspan.worker.models.families.qwen2 import CONTEXT, qwen_windows
from allspan.worker.models.foreign.common import alike, model_spec, read_context, read_gated_mlp, read_gqa, read_norm
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.spec import ModelSpec

_HEAD_DIM = 128
"""When the config gives none."""


def _read(config: ForeignConfig) -> ModelSpec:
    bias, rotary, eps = config.flag("attention_bias"), read_rotary(config, CONTEXT), read_norm(config).eps
    attention = read_gqa(config, rotary, _HEAD_DIM, qkv_bias=bias, output_bias=bias, qk_norm_eps=eps)
    context = read_context(config, rotary, CONTEXT)
    layers = alike(config, attention, read_gated_mlp(config), qwen_windows(config, context))
    return model_spec(config, "qwen3", layers, context)


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), _read, gguf_architectures=("qwen3",))
