"""Mixtral: Llama whose layers are mixtures of experts."""

from __future__ import annotations

from allspan.worker.models.blocks.moe import Moe
from allspan.worker.models.foreign.common import alike, model_spec, read_context, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.experts import (
    EXPERT_GGUF_KEYS,
    expert_entries,
    expert_spellings,
    read_num_experts,
    read_router,
)
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.foreign.windows import read_window, read_windows
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE, Entry, Spelling

_CONTEXT = 131072
_ROUTER = Spelling("hugging_face", (Entry("layers.{i}.router", "model.layers.{i}.mlp.gate", "blk.{i}.ffn_gate_inp"),))
"""The name that transformers gives it in memory."""


def _read(config: ForeignConfig) -> ModelSpec:
    rotary = read_rotary(config, _CONTEXT)
    context = read_context(config, rotary, _CONTEXT)
    router = read_router(config, normalises=True)
    sparse = Moe(read_num_experts(config), config.size("intermediate_size"), router)
    windows = read_windows(config, context, read_window(config))
    return model_spec(config, "mixtral", alike(config, read_gqa(config, rotary), sparse, windows), context)


MIXTRAL = Family(
    "mixtral",
    ("MixtralForCausalLM", "MixtralModel"),
    _read,
    gguf_architectures=("llama",),
    is_gguf_with_experts=True,
    weights=DENSE.with_entries(
        *expert_entries("block_sparse_moe.", "w1", "w3", "w2"),
        interleaved=("gguf",),
        spellings=(*expert_spellings(), *expert_spellings("block_sparse_moe."), _ROUTER),
    ),
    gguf_keys=EXPERT_GGUF_KEYS,
    renamed={"num_local_experts": "num_experts"},
    defaults={"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
)
