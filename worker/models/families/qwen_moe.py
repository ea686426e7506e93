"""Qwen's mixtures of experts: Qwen 1.5 and 2 (with a shared expert) and Qwen 3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from allspan.protos.model_files.json_values import shown
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.blocks.moe import Moe, SharedExpert
from allspan.worker.models.families.qwen2 import CONTEXT, qwen_windows
from allspan.worker.models.foreign.common import model_spec, read_context, read_gated_mlp, read_gqa, read_norm
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.experts import (
    EXPERT_GGUF_KEYS,
    expert_entries,
    expert_spellings,
    mixed,
    read_num_experts,
    read_router,
    shared_entries,
)
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.rope import RotarySpec
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms
from allspan.worker.weights.weight_map import DENSE

_HEAD_DIM = 128
_RENAMED = {"num_local_experts": "num_experts"}


def _sparse_layers(config: ForeignConfig) -> Collection[int]:
    """Every `decoder_sparse_step`th layer but those of `mlp_only_layers`."""
    step, count, dense = config.size("decoder_sparse_step", 1), config.size("num_hidden_layers"), []
    if (given := config.get("mlp_only_layers")) is not None:
        if not isinstance(given, list) or not all(type(layer) is int for layer in given):
            raise config.error(f"mlp_only_layers must be a list of layers, got {shown(given)}")
        dense = given
    return {layer for layer in range(count) if (layer + 1) % step == 0 and layer not in dense}


def _read(config: ForeignConfig, family: str, attention: Gqa, rotary: RotarySpec, sparse: Moe) -> ModelSpec:
    if config.get("sliding_window") == 0:  # as transformers writes that there is none
        config = config.changed({"sliding_window": None})
    context, norms = read_context(config, rotary, CONTEXT), Norms(read_norm(config))
    windows = qwen_windows(config, context)
    mlps = mixed(config, read_gated_mlp(config), sparse, _sparse_layers(config))
    layers = [
        LayerSpec(replace(attention, window=window), mlp, norms, norms)
        for window, mlp in zip(windows, mlps, strict=True)
    ]
    return model_spec(config, family, layers, context)


def _qwen2(config: ForeignConfig) -> ModelSpec:
    rotary = read_rotary(config, CONTEXT)
    attention = read_gqa(config, rotary, qkv_bias=config.flag("qkv_bias", True))
    shared = SharedExpert(config.size("shared_expert_intermediate_size"), is_gated=True)
    router = read_router(config, normalises=config.flag("norm_topk_prob"))
    width = config.size("moe_intermediate_size")
    return _read(config, "qwen2_moe", attention, rotary, Moe(read_num_experts(config), width, router, shared))


def _qwen3(config: ForeignConfig) -> ModelSpec:
    bias, rotary, eps = config.flag("attention_bias"), read_rotary(config, CONTEXT), read_norm(config).eps
    attention = read_gqa(config, rotary, _HEAD_DIM, qkv_bias=bias, output_bias=bias, qk_norm_eps=eps)
    router = read_router(config, normalises=config.flag("norm_topk_prob"))
    width = config.size("moe_intermediate_size")
    return _read(config, "qwen3_moe", attention, rotary, Moe(read_num_experts(config), width, router))


QWEN2_MOE = Family(
    "qwen2_moe",
    ("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    _qwen2,
    gguf_architectures=("qwen2moe",),
    weights=DENSE.with_entries(*expert_entries(), *shared_entries("mlp.shared_expert"), spellings=expert_spellings()),
    renamed=_RENAMED,
    gguf_keys=EXPERT_GGUF_KEYS,
)
QWEN3_MOE = Family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    _qwen3,
    gguf_architectures=("qwen3moe",),
    weights=DENSE.with_entries(*expert_entries(), spellings=expert_spellings()),
    renamed=_RENAMED,
    gguf_keys=EXPERT_GGUF_KEYS,
    gguf_values={"norm_topk_prob": True},
)
