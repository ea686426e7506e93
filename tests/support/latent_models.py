"""Tiny random models with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.tiny_models import prompt

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "v2 lite": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v2": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
    ),
    "v3": (
        "deepseek_v3",
        {
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4},
        },
    ),
    "v3, halves": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "rope_interleave": False, "first_k_dense_replace": 2, "q_lora_rank": None}
        | {"attention_bias": True},
    ),
    "v3, wide": (
        "deepseek_v3",
        {
            "hidden_size": 160,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 48,
            "v_head_dim": 40,
            "q_lora_rank": 136,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
        },
    ),
    "v3, beyond": (
        "deepseek_v3",
        {"kv_lora_rank": 576, "qk_rope_head_dim": 96, "qk_nope_head_dim": 5, "v_head_dim": 7, "q_lora_rank": 9}
        | {"n_group": 1, "topk_group": 1},
    ),
    "glm lite": ("glm4_moe_lite", {"num_attention_heads": 5, "num_key_value_heads": 5, "v_head_dim": 24}),
}
IDS = prompt(70, 97)


def save_latent(folder: Path, name: str, **changes: Any) -> Any:
    """A random model whose routers' biases decide, and none of whose norms and biases is without effect."""
    model_type, config = MODELS[name]
    torch.manual_seed(5)
    made = AutoConfig.for_model(model_type, **SIZES | config | changes)
    model: Any = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.copy_(torch.randperm(len(buffer)) * 2.0 - 12.0)
                buffer[::3] += torch.rand(len(buffer[::3]))
    model.eval()
    model.save_pretrained(folder)
    return model
