"""Folders and GGUF files of families with latent attention: spellings, formats, released sizes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.backend.cuda.backend import kernels_for
from allspan.worker.load.loader import prepare
from allspan.worker.load.registry import find_model
from allspan.worker.models.blocks.mla import Mla
from allspan.worker.models.layout import cache_groups
from allspan.worker.models.pieces import Linear
from allspan.worker.models.shard import make_shard
from allspan.worker.weights.checkpoint import check_tensors
from allspan.worker.weights.latent_gguf_file import LatentGgufFile
from support.family_files import save_family_gguf
from support.family_rows import FamilyRow
from support.latent_models import IDS, MODELS, SIZES, YARN, save_latent
from support.quantised_checkpoints import FORMS, FP8_BLOCKS, fp8_of_blocks, quantise_folder
from support.tiny_models import logits_on_ranks, reference_logits, relative_error

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
        | {"attention.q_lora_rank": 0}  # as some files say that there is none
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
FILES = {**FILES, "two dimensions": FILES["groups"]}
"""A model, its rows of keys where they and those of values are two tensors, and metadata."""


@pytest.mark.parametrize("file", FILES)
def test_gguf_files_of_both_spellings_have_the_logits_of_folders(file: str, tmp_path: Path) -> None:
    name, key_rows, metadata = FILES[file]
    model = save_latent(tmp_path, name)
    row = FamilyRow(MODELS[name][0], gguf="deepseek2", metadata=_HEADS | _EXPERTS | metadata, key_rows=key_rows)
    row = replace(row, is_flat=file == "two dimensions")
    save_family_gguf(tmp_path / "model.gguf", model, row)
    found = logits_on_ranks(tmp_path / "model.gguf", 3, [IDS], backend="cpu")[0]
    assert relative_error(found, reference_logits(model, IDS)) < 1e-4
    if name == "v2":  # others have numbers in their config that float32 rounds
        assert torch.equal(found, logits_on_ranks(tmp_path, 3, [IDS], backend="cpu")[0])


@pytest.mark.parametrize(
    ("ours", "other", "message"),
    [
        ("attn_k_b", None, r"tensor 'blk.1.attn_k_b.weight' is missing, 'blk.1.attn_v_b.weight' is there"),
        ("attn_v_b", None, r"tensor 'blk.1.attn_v_b.weight' is missing, 'blk.1.attn_k_b.weight' is there"),
        ("attn_v_b", (48, 32), r"of shape \[4, 32, 16\] and .* of shape \[48, 32\] must be"),
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


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.key_length_mla": 8}, "attention.key_length_mla 8 must be greater than rope.dimension_count 8"),
        ({"attention.key_length_mla": 0}, r"attention.key_length_mla must be a positive .* got 0 \(at most 8192\)"),
        ({"attention.value_length_mla": 9000}, "attention.value_length_mla is 9000, must be at most 8192"),
        ({"attention.kv_lora_rank": 31}, r"'blk.0.attn_kv_a_mqa.weight' has shape \[40, 64\], expected \[39, 64\]"),
        ({"expert_gating_func": 1}, r"'blk.[12].exp_probs_b.bias' is not part of the model"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 16}
            | {"rope.scaling.yarn_log_multiplier": -1.0},
            "mscale_all_dim must be a positive number",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name(
    metadata: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    name, key_rows, own = FILES["sigmoid"]
    row = FamilyRow(MODELS[name][0], gguf="deepseek2", metadata=_HEADS | _EXPERTS | own | metadata, key_rows=key_rows)
    save_family_gguf(tmp_path / "model.gguf", save_latent(tmp_path, name), row)
    with pytest.raises(CheckpointError, match=message):
        logits_on_ranks(tmp_path / "model.gguf", 1, [IDS], backend="cpu")


def test_blocks_of_fp8_may_end_within_a_latent_and_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rows of kv_a that turn are of two blocks, and come in another order; kv_b is held as floats. On CPUs all
    are, which a line of the log says; on GPUs the others stay in fp8."""
    model = save_latent(tmp_path, "v3, wide")
    decoded = quantise_folder(tmp_path, fp8_of_blocks, FP8_BLOCKS, (".gate.", "layers.2.mlp."))
    model.load_state_dict({name: weight.float() for name, weight in decoded.items()}, strict=False)
    expected = reference_logits(model, IDS)
    found = logits_on_ranks(tmp_path, 2, [IDS], quantization="none", dtype="float32")[0]
    assert relative_error(found, expected) < 1e-4
    caplog.clear()
    found = logits_on_ranks(tmp_path, 4, [IDS], dtype="float32", backend="cpu")[0]
    assert relative_error(found, expected) < 0.01
    assert caplog.messages.count(f"{tmp_path}: tensors of type fp8/128 are decoded and held as float32") == 1
    gpu = prepare(ModelConfig(str(tmp_path), "m", dtype="bfloat16", device="cuda"), CacheConfig(), 0, 1).holding
    held = {piece.name: gpu.tensors(piece) for piece in gpu.pieces if isinstance(piece, Linear)}
    kinds = {name: {tensor.dtype for tensor in each.values()} for name, each in held.items() if ".0." in name}
    packed = ("qkv_a", "q_b", "o", "gate_up", "down")
    assert kinds == {f"layers.0.{name}": {torch.uint8} for name in packed} | {"layers.0.kv_b": {torch.bfloat16}}
    assert held["layers.0.qkv_a"]["layers.0.qkv_a.weight"].shape == (136 + 576, 160 + 2 * 16 + 8)


@pytest.mark.parametrize("name", ["v2 lite", "v2"])
def test_queries_and_latents_in_different_formats_are_two_products(name: str, tmp_path: Path) -> None:
    """Of layer 1 alone."""
    model = save_latent(tmp_path, name)
    kept = (".gate.", "kv_b_proj", "mlp.experts.", "layers.1.self_attn.kv_a_proj_with_mqa")
    decoded = quantise_folder(tmp_path, *FORMS["compressed-int8-alone"], kept)
    model.load_state_dict({key: weight.float() for key, weight in decoded.items()}, strict=False)
    holding = prepare(ModelConfig(str(tmp_path), "m", dtype="float32"), CacheConfig(), 1, 2).holding
    held = {piece.name: list(holding.tensors(piece)) for piece in holding.pieces}
    assert held["layers.0.qkv_a"] == ["layers.0.qkv_a.weight"]
    assert held["layers.1.qkv_a"] == ["layers.1.qkv_a.weight.0", "layers.1.qkv_a.weight.1"]
    expected = reference_logits(model, IDS)
    for ranks in (1, 2):
        found = logits_on_ranks(tmp_path, ranks, [IDS], dtype="float32", backend="cpu")[0]
        assert relative_error(found, expected) < 0.02


def test_scales_of_blocks_that_do_not_cover_latent_and_key_are_refused(tmp_path: Path) -> None:
    """Of 576 rows the last block has 64."""
    save_latent(tmp_path, "v3, wide")
    quantise_folder(tmp_path, fp8_of_blocks, FP8_BLOCKS, (".gate.", "layers.2.mlp."))
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.self_attn.kv_a_proj_with_mqa"
    tensors[f"{name}.weight_scale_inv"] = tensors[f"{name}.weight_scale_inv"][:4].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"'{name}.*shape \[4, 2\], where blocks have \[5, 2\]"):
        logits_on_ranks(tmp_path, 1, [IDS], backend="cpu")


def test_layers_that_draft_are_left_unread(tmp_path: Path) -> None:
    """Released models have one behind the last layer, in folders with its own copy of the embedding and the head."""
    model = save_latent(tmp_path, "v3")
    (expected,) = logits_on_ranks(tmp_path, 1, [IDS], backend="cpu")
    tensors = load_file(tmp_path / "model.safetensors")
    drafting = {key.replace("layers.2.", "layers.3."): each.clone() for key, each in tensors.items() if ".2." in key}
    own = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "embed_tokens.weight", "shared_head.head.weight")
    drafting |= {f"model.layers.3.{name}": torch.zeros(3, 5) for name in own}
    save_file(tensors | drafting, tmp_path / "model.safetensors")
    assert torch.equal(logits_on_ranks(tmp_path, 1, [IDS], backend="cpu")[0], expected)
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.layers.2.eh_proj.weight' is not part of the model"):
        logits_on_ranks(tmp_path, 1, [IDS], backend="cpu")
    name, key_rows, metadata = FILES["sigmoid"]
    model = save_latent(tmp_path, name)
    own_metadata = _HEADS | _EXPERTS | metadata | {"block_count": 4, "nextn_predict_layers": 1}
    row = FamilyRow(
        "glm4_moe_lite",
        gguf="deepseek2",
        metadata=own_metadata,
        key_rows=key_rows,
        tensors={"blk.3.nextn.eh_proj.weight": [1.0, 2.0], "blk.3.attn_norm.weight": [1.0]},
    )
    save_family_gguf(tmp_path / "model.gguf", model, row)
    found = logits_on_ranks(tmp_path / "model.gguf", 1, [IDS], backend="cpu")[0]
    assert relative_error(found, reference_logits(model, IDS)) < 1e-4


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
    ("sizes", "dtype", "pages", "backend"),
    [
        ((512, 64), "bfloat16", "auto", "cuda"),
        ((512, 64), "float16", "int8", "cuda"),
        ((528, 64), "bfloat16", "auto", "reference"),
        ((512, 80), "bfloat16", "auto", "reference"),
        ((512, 24), "bfloat16", "auto", "reference"),
        ((512, 64), "bfloat16", "uint4", "reference"),
        ((512, 64), "float32", "auto", "reference"),
    ],
)
def test_what_the_kernels_of_a_gpu_are_not_for_is_said_and_runs_on_the_reference(
    sizes: tuple[int, int], dtype: str, pages: Any, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    latent = dict(zip(("kv_lora_rank", "qk_rope_head_dim"), sizes, strict=True))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", **SIZES, "n_group": 4, "topk_group": 2} | latent)
    )
    config = ModelConfig(str(tmp_path), "m", dtype=dtype, device="cuda", load_format="dummy")
    assert kernels_for(prepare(config, CacheConfig(kv_cache_dtype=pages), 0, 1).kernel_needs) == backend
    said = f"(latent, turning) elements of ({sizes},) run on torch's own"
    assert (said in caplog.text) == (backend == "reference")


def test_more_ranks_than_heads_are_refused_with_both_numbers(tmp_path: Path) -> None:
    """Fewer ranks may have unequal numbers of heads."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", **SIZES, "n_group": 4, "topk_group": 2})
    )
    config = ModelConfig(str(tmp_path), "m", load_format="dummy")
    with pytest.raises(ConfigError, match="ranks 5 is more than the model's 4 query heads: use at most 4 ranks"):
        prepare(config, CacheConfig(), 0, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"kv_lora_rank": 1 << 20}, "kv_lora_rank is 1048576, must be at most 8192"),
        ({"kv_lora_rank": 0}, r"kv_lora_rank must be a positive integer, got 0 \(at most 8192\)"),
        ({"q_lora_rank": "24"}, r"q_lora_rank must be a positive integer, got '24' \(at most 8192\)"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim must be a positive integer, got 0"),
        ({"v_head_dim": 10**30}, "v_head_dim is 10+, must be at most 8192"),
        ({"n_routed_experts": 10**9}, "num_experts is 1000000000, must be at most 4096"),
        ({"n_shared_experts": 10**9}, "n_shared_experts is 1000000000, must be at most 4096"),
        ({"moe_intermediate_size": 10**9}, "moe_intermediate_size is 1000000000, must be at most 1048576"),
        ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000, must be at most 8192"),
        ({"rope_interleave": "yes"}, "rope_interleave must be true or false, got 'yes'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"rope_scaling": YARN | {"mscale_all_dim": -1}}, "rope_scaling: mscale_all_dim must be a positive number"),
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
