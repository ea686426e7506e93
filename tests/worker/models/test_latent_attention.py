"""Families with latent attention against transformers, on any number of ranks, in chunks and formats of the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from allspan.protos.api.errors import CheckpointError
from allspan.protos.config.settings import CacheConfig
from allspan.worker.load.registry import find_model
from allspan.worker.models.blocks.mla import Mla
from allspan.worker.models.layout import cache_groups
from allspan.worker.models.shard import make_shard
from allspan.worker.models.spec_json import spec_json, spec_of
from allspan.worker.weights.checkpoint import check_tensors
from allspan.worker.weights.latent_gguf_file import LatentGgufFile
from support.family_files import save_family_gguf
from support.family_rows import FamilyRow
from support.quantised_checkpoints import FP8_BLOCKS, fp8_of_blocks, quantise_folder
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error

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
        {"n_group": 1, "topk_group": 1, "rope_interleave": False, "first_k_dense_replace": 2},
    ),
    "v3, wide": (
        "deepseek_v3",
        {
            "hidden_size": 160,
            "kv_lora_rank": 96,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 48,
            "v_head_dim": 40,
            "q_lora_rank": 136,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
        },
    ),
    "glm lite": ("glm4_moe_lite", {"num_attention_heads": 5, "num_key_value_heads": 5, "v_head_dim": 24}),
}
IDS = prompt(70, 97)


def save(folder: Path, name: str) -> Any:
    """A random model whose routers' biases decide, and none of whose norms and biases is without effect."""
    model_type, config = MODELS[name]
    torch.manual_seed(5)
    made = AutoConfig.for_model(model_type, **SIZES | config)
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


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    expected = reference_logits(save(tmp_path, name), IDS)
    assert relative_error(logits_on_ranks(tmp_path, 1, [IDS])[0], expected) < 1e-4
    for ranks, chunk in ((1, 70), (2, 33), (3, 70), (4, 1024)):
        found = logits_on_ranks(tmp_path, ranks, [IDS], chunk=chunk, backend="cpu")[0]
        assert relative_error(found, expected) < 1e-4, f"{ranks} ranks, chunks of {chunk}"
    spec = find_model(str(tmp_path)).spec
    assert spec_of(spec_json(spec)) == spec


def test_a_prompt_in_chunks_and_among_others_gets_the_same_bits(tmp_path: Path) -> None:
    save(tmp_path, "v2 lite")
    others = [prompt(19, 97), IDS, prompt(1, 97)]
    alone = logits_on_ranks(tmp_path, 1, [IDS], backend="cpu")[0]
    for chunk in (1, 17, 64):
        assert torch.equal(logits_on_ranks(tmp_path, 1, [IDS], chunk=chunk, backend="cpu")[0], alone)
    assert torch.equal(logits_on_ranks(tmp_path, 1, others, backend="cpu")[1], alone)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.02), ("int8", 0.07), ("fp8", 0.15)])
def test_latents_in_fewer_bits_give_nearly_the_same_logits(dtype: Any, most: float, tmp_path: Path) -> None:
    """Nearly on the whole: where a choice of experts changes, single logits are others."""
    expected = reference_logits(save(tmp_path, "v2 lite"), IDS)
    pages = CacheConfig(page_size=16, kv_cache_dtype=dtype)
    for backend in ("reference", "cpu"):
        found = logits_on_ranks(tmp_path, 2, [IDS], chunk=33, cache=pages, backend=backend)[0]
        assert float((found - expected).norm() / expected.norm()) < most


_HEADS = {"attention.kv_lora_rank": 32, "rope.dimension_count": 8, "leading_dense_block_count": 1}
_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48, "expert_weights_scale": 1.0}
_OLD = {"attention.key_length": 24, "attention.value_length": 12}
_NEW = {"attention.key_length": 40, "attention.value_length": 32, "attention.key_length_mla": 24}
FILES: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "pairs in one tensor": (
        "v2 lite",
        0,
        _OLD
        | {"expert_shared_count": 2, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
        | {"rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.0707},
    ),
    "groups": (
        "v2",
        16,
        _NEW
        | {"attention.value_length_mla": 12, "attention.q_lora_rank": 24, "leading_dense_block_count": 0}
        | {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 16.0}
        | {"expert_shared_count": 2},
    ),
    "sigmoid": (
        "glm lite",
        16,
        _NEW
        | {"attention.value_length_mla": 24, "attention.q_lora_rank": 24, "expert_gating_func": 2}
        | {"expert_weights_norm": True, "expert_weights_scale": 1.8, "expert_shared_count": 1},
    ),
}
"""A model, its rows of keys where they and those of values are two tensors, and metadata."""


@pytest.mark.parametrize("file", FILES)
def test_gguf_files_of_both_spellings_have_the_logits_of_folders(file: str, tmp_path: Path) -> None:
    name, key_rows, metadata = FILES[file]
    model = save(tmp_path, name)
    row = FamilyRow(MODELS[name][0], gguf="deepseek2", metadata=_HEADS | _EXPERTS | metadata, key_rows=key_rows)
    save_family_gguf(tmp_path / "model.gguf", model, row)
    found = logits_on_ranks(tmp_path / "model.gguf", 3, [IDS], backend="cpu")[0]
    assert relative_error(found, reference_logits(model, IDS)) < 1e-4


@pytest.mark.parametrize(
    ("ours", "other", "message"),
    [
        ("attn_k_b", None, r"tensor 'blk.1.attn_k_b.weight' is missing, 'blk.1.attn_v_b.weight' is there"),
        ("attn_v_b", None, r"tensor 'blk.1.attn_v_b.weight' is missing, 'blk.1.attn_k_b.weight' is there"),
        ("attn_v_b", (4, 12, 30), r"of shape \[4, 32, 16\] and .* of shape \[4, 12, 30\] must be"),
        ("attn_v_b", (4, 11, 32), r"tensor 'blk.1.attn_kv_b.weight' has shape \[108, 32\], expected \[112, 32\]"),
    ],
)
def test_halves_of_split_tensors_that_do_not_fit_are_refused(
    ours: str, other: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    shapes = {
        f"blk.{i}.{name}.weight": shape
        for i in range(2)
        for name, shape in (("attn_k_b", (4, 32, 16)), ("attn_v_b", (4, 12, 32)))
    }
    shapes.pop(f"blk.1.{ours}.weight")
    shapes |= {} if other is None else {f"blk.1.{ours}.weight": other}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "deepseek2")
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = {f"blk.{i}.attn_kv_b.weight": (112, 32) for i in range(2)}
    with pytest.raises(CheckpointError, match=message):
        check_tensors(LatentGgufFile(tmp_path / "model.gguf"), expected, ())


def test_blocks_of_fp8_may_end_within_a_latent_and_its_key(tmp_path: Path) -> None:
    """The rows of kv_a that turn are of two blocks, and come in another order; kv_b is held as floats."""
    model = save(tmp_path, "v3, wide")
    decoded = quantise_folder(tmp_path, fp8_of_blocks, FP8_BLOCKS, (".gate.", "layers.2.mlp."))
    model.load_state_dict({name: weight.float() for name, weight in decoded.items()}, strict=False)
    expected = reference_logits(model, IDS)
    found = logits_on_ranks(tmp_path, 2, [IDS], quantization="none", dtype="float32")[0]
    assert relative_error(found, expected) < 1e-4
    found = logits_on_ranks(tmp_path, 4, [IDS], dtype="float32", backend="cpu")[0]
    assert relative_error(found, expected) < 0.01


RELEASED = {
    "deepseek_v2": {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 2048, "q_lora_rank": None},
    "deepseek_v3": {"num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168},
    "kimi_k2": {"num_hidden_layers": 61, "num_attention_heads": 64, "hidden_size": 7168, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {"num_hidden_layers": 47, "num_attention_heads": 20, "hidden_size": 2048},
}
"""What the configs of released models say beside the defaults of their classes."""
MSCALES = {"deepseek_v2": (40, 0.707), "deepseek_v3": (40, 1.0), "kimi_k2": (32, 1.0), "glm4_moe_lite": (1, 0.0)}


@pytest.mark.parametrize(
    ("name", "token_bytes", "scale"),
    [
        ("deepseek_v2", 31_104, 0.1147214),
        ("deepseek_v3", 70_272, 0.1352338),
        ("kimi_k2", 70_272, 0.1308608),
        ("glm4_moe_lite", 54_144, 256**-0.5),
    ],
)
def test_released_models_take_the_bytes_of_latents_and_have_the_scale_of_yarn(
    name: str, token_bytes: int, scale: float, tmp_path: Path
) -> None:
    factor, mscale = MSCALES[name]
    yarn = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}
    config = {
        "model_type": name,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "vocab_size": 1000,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "max_position_embeddings": 4096,
        **({"rope_scaling": yarn | {"mscale": mscale, "mscale_all_dim": mscale}} if mscale else {}),
        **RELEASED[name],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = find_model(str(tmp_path)).spec
    for size in (1, 4):
        (group,) = cache_groups(spec, make_shard(0, size), 64, "bfloat16")
        assert group.spec.bytes_per_page == 64 * token_bytes
    attention = spec.layers[0].attention
    assert isinstance(attention, Mla)
    assert attention.scale == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"kv_lora_rank": 1 << 20}, "kv_lora_rank is 1048576, must be at most 8192"),
        ({"topk_method": "best"}, "topk_method 'best' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({"n_group": 3, "topk_group": 1}, "n_group 3"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3", **SIZES, "n_group": 4, "topk_group": 2} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        find_model(str(tmp_path))
