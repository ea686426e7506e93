"""Tiny models of every family: a row each, which the tests of families go through."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 88,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHOICE_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class FamilyRow:
    """A tiny model: what its config has beside SIZES. `gguf` names the architecture of its GGUF file, if it has one,
    with metadata beside the usual; files of "normal" rope have the pairs of a head side by side."""

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    gguf: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_permuted: bool = False
    """The converter has put a half-split head's pairs side by side."""
    max_model_len: int = 0
    norm_offset: float = 0.0
    """How much larger norms are in the GGUF file than in the folder."""
    key_rows: int = 0
    """The rows of keys of each head in kv_b_proj, where the GGUF file has keys, transposed, and values apart."""
    is_flat: bool = False
    """Whether it has them in two dimensions, the heads' rows below each other."""
    tensors: Mapping[str, list[float]] = field(default_factory=dict)
    """Further tensors of the GGUF file."""


LONG, SHORT = [1.5, 2.0, 3.0, 4.0, 6.0, 8.0], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
LONGROPE = {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT, "rope_theta": 10000.0}
PHI4_MINI = {
    "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64},
    "original_max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "tie_word_embeddings": True,
    "rope_parameters": ROPE,
}
HALF = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "attention_bias": True}

TWO_ROPES = {
    "sliding_attention": ROPE | {"rope_theta": 1000.0},
    "full_attention": ROPE | {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
}
EVERY_SECOND = ["sliding_attention", "full_attention"] * 2
LATE_WINDOW = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2, "rope_parameters": ROPE}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "rope_parameters": ROPE}
EXPERT_METADATA = {"expert_used_count": 2, "expert_feed_forward_length": 48}
LATENT = EXPERTS | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
LATENT_METADATA = EXPERT_METADATA | {
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.key_length_mla": 32,
    "attention.value_length": 32,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 16,
    "expert_count": 8,
    "leading_dense_block_count": 1,
}

FAMILIES: dict[str, FamilyRow] = {
    "llama": FamilyRow("llama", {"rope_parameters": ROPE}, "llama", is_permuted=True),
    "llama, dynamic": FamilyRow(
        "llama",
        {
            "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0},
            "max_position_embeddings": 100,
        },
        max_model_len=150,
    ),
    "mistral": FamilyRow("mistral", {"rope_parameters": ROPE, "sliding_window": 40}),
    "qwen2": FamilyRow("qwen2", {"rope_parameters": ROPE}, "qwen2"),
    "qwen3": FamilyRow("qwen3", {"rope_parameters": ROPE}, "qwen3"),
    "qwen2, window": FamilyRow("qwen2", LATE_WINDOW),
    "qwen3, window": FamilyRow("qwen3", LATE_WINDOW),
    "ministral": FamilyRow("ministral", {"sliding_window": 40, "rope_parameters": ROPE, "layer_types": EVERY_SECOND}),
    "ministral3": FamilyRow(
        "ministral3",
        {"rope_parameters": MINISTRAL3_ROPE},
        "mistral3",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
        is_permuted=True,
    ),
    "phi3, long": FamilyRow(
        "phi3",
        PHI4_MINI,
        "phi3",
        {
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": float((1 + np.log(4) / np.log(64)) ** 0.5),
        },
        tensors={"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT},
    ),
    "phi3, short": FamilyRow("phi3", PHI4_MINI | {"original_max_position_embeddings": 200}, max_model_len=200),
    "phi3, window": FamilyRow("phi3", {"sliding_window": 40, "rope_parameters": ROPE}),
    "granite": FamilyRow(
        "granite",
        GRANITE | {"attention_bias": True},
        "granite",
        {"embedding_scale": 12.0, "attention.scale": 0.3, "residual_scale": 0.22, "logit_scale": 8.0},
        is_permuted=True,
    ),
    "granitemoehybrid": FamilyRow(
        "granitemoehybrid",
        GRANITE
        | {
            "layer_types": ["attention"] * 4,
            "num_local_experts": 0,
            "shared_intermediate_size": 88,
            "position_embedding_type": "rope",
        },
    ),
    "granitemoehybrid, nope": FamilyRow(
        "granitemoehybrid",
        GRANITE
        | {
            "layer_types": ["attention"] * 4,
            "num_local_experts": 0,
            "shared_intermediate_size": 72,
            "position_embedding_type": "nope",
            "tie_word_embeddings": False,
        },
    ),
    "smollm3": FamilyRow("smollm3", {"rope_parameters": ROPE}, "smollm3", is_permuted=True),
    "glm": FamilyRow("glm", HALF),
    "glm4": FamilyRow("glm4", HALF, "glm4", {"rope.dimension_count": 8}),
    "seed_oss": FamilyRow("seed_oss", {"rope_parameters": ROPE, "head_dim": 24}, "seed_oss"),
    "ernie4_5": FamilyRow("ernie4_5", {"rope_parameters": ROPE | {"rope_theta": 5e5}, "use_bias": False}, "ernie4_5"),
    "ernie4_5, biases": FamilyRow("ernie4_5", {"rope_parameters": ROPE, "use_bias": True}),
    "helium": FamilyRow("helium", {"rope_parameters": ROPE}),
    "exaone4": FamilyRow(
        "exaone4",
        {"rope_parameters": ROPE, "sliding_window": 40, "sliding_window_pattern": 2},
        "exaone4",
        {"attention.sliding_window": 40, "attention.sliding_window_pattern": [True, False, True, False]},
    ),
    "exaone4, no window": FamilyRow(
        "exaone4",
        {"rope_parameters": ROPE, "sliding_window": None, "layer_types": ["full_attention"] * 4},
        "exaone4",
    ),
    "gemma": FamilyRow("gemma", {"rope_parameters": ROPE, "num_key_value_heads": 1}, "gemma", norm_offset=1.0),
    "gemma2": FamilyRow(
        "gemma2",
        {
            "rope_parameters": ROPE,
            "sliding_window": 40,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
        "gemma2",
        {"attention.sliding_window": 40, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        norm_offset=1.0,
    ),
    "gemma3": FamilyRow(
        "gemma3_text",
        {"rope_parameters": TWO_ROPES, "sliding_window": 40, "query_pre_attn_scalar": 16, "layer_types": EVERY_SECOND},
        "gemma3",
        {
            "attention.sliding_window": 40,
            "attention.sliding_window_pattern": [True, False, True, False],
            "rope.freq_base_swa": 1000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        norm_offset=1.0,
    ),
    "mixtral": FamilyRow(
        "mixtral",
        {"num_local_experts": 5, "intermediate_size": 96, "rope_parameters": ROPE},
        "llama",
        {"expert_count": 5, "expert_used_count": 2},
        is_permuted=True,
    ),
    "qwen2_moe": FamilyRow(
        "qwen2_moe",
        EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 56},
        "qwen2moe",
        EXPERT_METADATA | {"expert_count": 6, "expert_shared_feed_forward_length": 56},
    ),
    "qwen3_moe": FamilyRow(
        "qwen3_moe",
        EXPERTS | {"num_local_experts": 5, "norm_topk_prob": True},
        "qwen3moe",
        EXPERT_METADATA | {"expert_count": 5},
    ),
    "glm4_moe": FamilyRow(
        "glm4_moe",
        EXPERTS | HALF | {"n_routed_experts": 8, "routed_scaling_factor": 2.5, "use_qk_norm": True, "n_group": 2},
        "glm4moe",
        EXPERT_METADATA
        | {
            "rope.dimension_count": 8,
            "expert_count": 8,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "leading_dense_block_count": 1,
        },
    ),
    "deepseek_v2": FamilyRow(
        "deepseek_v2",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None},
        "deepseek2",
        LATENT_METADATA | {"expert_group_count": 4, "expert_group_used_count": 2, "expert_shared_count": 2},
        key_rows=16,
    ),
    "deepseek_v3": FamilyRow("deepseek_v3", LATENT | {"n_group": 4, "topk_group": 2, "rope_interleave": False}),
    "glm4_moe_lite": FamilyRow("glm4_moe_lite", LATENT),
    "minimax_m2": FamilyRow(
        "minimax_m2",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
        "minimax-m2",
        EXPERT_METADATA | {"rope.dimension_count": 8, "expert_count": 6, "expert_gating_func": 2},
    ),
    "gpt_oss": FamilyRow(
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 96,
            "sliding_window": 24,
            "rope_parameters": GPT_OSS_ROPE,
        },
        "gpt-oss",
        {
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "attention.sliding_window": 24,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
}
"""Name of a case → its row: a model type, and what sets the case apart from others of it."""


def save_family(folder: Path, row: FamilyRow) -> Any:
    """Writes a random checkpoint in which no norm, bias or rotation is without effect; returns transformers' model."""
    config = AutoConfig.for_model(row.model_type, **{**SIZES, **row.config})
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
            if key.endswith("router.bias"):  # decides, so that roundings do not
                parameter.add_(12.0 * (-1.0) ** torch.arange(len(parameter)))
        for key, buffer in model.named_buffers():
            if key.endswith(CHOICE_BIAS):
                buffer.copy_(torch.randperm(len(buffer)) * 2.0 - 12.0)
    model.eval()
    model.save_pretrained(folder)
    return model


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of each expert as those of all experts of a layer."""
    found, experts = dict[str, Tensor](), dict[str, dict[int, dict[str, Tensor]]]()
    for name, tensor in tensors.items():
        if own := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            experts.setdefault(own[1], {}).setdefault(int(own[2]), {})[own[3]] = tensor
        else:
            found[name] = tensor
    for start, own in experts.items():
        all_of = [own[number] for number in sorted(own)]
        found[f"{start}.gate_up_proj"] = torch.stack([torch.cat((each["gate"], each["up"])) for each in all_of])
        found[f"{start}.down_proj"] = torch.stack([each["down"] for each in all_of])
    return found
