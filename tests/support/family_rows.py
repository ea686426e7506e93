"""Tiny models of every family: a row each, which the tests of families go through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.tiny_gguf import permuted

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
_NONE: Mapping[str, np.ndarray] = {}
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


def _parts(name: str, values: np.ndarray, model_type: str) -> dict[str, np.ndarray]:
    """Experts' tensors as converters have them: gate and up apart."""
    if model_type == "gpt_oss":
        return _gpt_oss_parts(name, values)
    if not name.endswith("experts.gate_up_proj"):
        return {name + (".weight" if name.endswith("experts.down_proj") else ""): values}
    gate, up = np.split(values, 2, axis=1)
    return {name.replace("gate_up", "gate") + ".weight": gate, name.replace("gate_up", "up") + ".weight": up}


def _gpt_oss_parts(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Matrices of its experts are transposed, and rows of gate and up come in turn."""
    if name.endswith("sinks"):
        return {f"{name}.weight": values}
    if ".experts." not in name:
        return {name: values}
    stem, suffix = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    values = values.swapaxes(1, 2) if suffix == "weight" else values
    if not stem.endswith("gate_up_proj"):
        return {f"{stem}.{suffix}": values}
    return {f"{stem.replace('gate_up', each)}.{suffix}": values[:, i::2] for i, each in enumerate(("gate", "up"))}


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


def save_family_gguf(path: Path, model: Any, row: FamilyRow, mxfp4: Mapping[str, np.ndarray] = _NONE) -> None:
    """Writes the model in float32 under the names that the `gguf` package has for its architecture; `mxfp4` has the
    blocks of tensors that are of that type."""
    config, kind = model.config, next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == row.gguf)
    writer = gguf.GGUFWriter(path, row.gguf)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"] if "rope_theta" in rope else rope["full_attention"]["rope_theta"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_token_list([f"token{i}" for i in range(2000)])
    writer.add_eos_token_id(2)
    for key, value in row.metadata.items():
        _add(writer, f"{row.gguf}.{key}", value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(CHOICE_BIAS)}
    for name, buffer in biases.items():
        writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy())
    parts = (_parts(name, parameter.detach().numpy(), row.model_type) for name, parameter in model.named_parameters())
    for name, values in ((name, values) for each in parts for name, values in each.items()):
        role = name.split(".")[-2]
        stored = permuted(values, heads[role]) if row.is_permuted and role in heads else values
        foreign = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert foreign is not None, name
        stored = stored + np.float32(row.norm_offset) if "norm" in name else stored
        stored = stored[0] if "ffn_gate_inp_shexp" in foreign else stored  # llama.cpp's converter drops such dimensions
        if foreign in mxfp4:
            writer.add_tensor(foreign, mxfp4[foreign], raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(foreign, np.ascontiguousarray(stored))
    for name, floats in row.tensors.items():
        writer.add_tensor(name, np.array(floats, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
