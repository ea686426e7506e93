"""MiniMax-M2: a sigmoid router whose choice has a bias, norms over all heads of queries and keys, partial rotary."""

from __future__ import annotations

from allspan.protos.model_files.json_values import shown
from allspan.worker.models.blocks.moe import Moe
from allspan.worker.models.foreign.common import alike, head_size, model_spec, read_context, read_gqa, read_norm
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
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.weight_map import DENSE, Entry, Foreign, Spelling

_CONTEXT = 196608
_BIAS = "e_score_correction_bias"


def _spelled(layer: str) -> tuple[Entry, Entry]:
    """The router and its bias in Hugging Face's block `layer`."""
    bias, gguf = Foreign(f"model.layers.{{i}}.{layer}.{_BIAS}", has_suffix=False), "blk.{i}."
    return (
        Entry("layers.{i}.router", f"model.layers.{{i}}.{layer}.gate", gguf + "ffn_gate_inp"),
        Entry("layers.{i}.router_bias", bias, Foreign(gguf + "exp_probs_b.bias", has_suffix=False)),
    )


def _read(config: ForeignConfig) -> ModelSpec:
    for key, value in {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}.items():
        if config.get(key) not in (None, value):
            raise config.error(f"{key} {shown(config.get(key))} is not supported (supported: {shown(value)})")
    size = head_size(config)
    if config.get("rotary_dim") is not None and config.get("partial_rotary_factor") is None:
        config = config.changed({"partial_rotary_factor": (config.size("rotary_dim") + 0.5) / size})
    rotary = read_rotary(config, _CONTEXT, size)
    attention = read_gqa(config, rotary, qk_norm_eps=read_norm(config).eps, norms_all_heads=True)
    width = config.size("moe_intermediate_size", config.size("intermediate_size"))
    router = read_router(config, "sigmoid", normalises=True)
    sparse = Moe(read_num_experts(config), width, router, has_choice_bias=config.flag("use_routing_bias", True))
    layers = alike(config, attention, sparse)
    return model_spec(config, "minimax_m2", layers, read_context(config, rotary, _CONTEXT))


MINIMAX_M2 = Family(
    "minimax_m2",
    ("MiniMaxM2ForCausalLM", "MiniMaxM2Model"),
    _read,
    gguf_architectures=("minimax-m2",),
    weights=DENSE.with_entries(
        *expert_entries("block_sparse_moe.", "w1", "w3", "w2"),
        *_spelled("block_sparse_moe"),
        spellings=(
            *expert_spellings(),
            *expert_spellings("block_sparse_moe."),
            Spelling("hugging_face", _spelled("mlp")),
        ),
    ),
    gguf_keys=EXPERT_GGUF_KEYS,
    has_draft_layers=True,
    renamed={"num_local_experts": "num_experts"},
    defaults={
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5000000.0,
    },
    turns_part=True,
)
