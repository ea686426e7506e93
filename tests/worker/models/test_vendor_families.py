"""Logits of families that transformers has no class for, against plain numpy, at every position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from allspan.protos.api.errors import CheckpointError
from allspan.protos.config.settings import ModelConfig, ServiceConfig, WorkerConfig
from allspan.worker.load.registry import find_model
from allspan.worker.tools.convert import convert
from support.family_rows import FAMILIES, save_family
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error
from support.vendor_models import CONFIGS, save_vendor, vendor_logits

Q8_0 = gguf.GGMLQuantizationType.Q8_0
CHATGLM_NAMES = {
    "transformer.embedding.word_embeddings": "token_embd",
    "transformer.encoder.final_layernorm": "output_norm",
    "transformer.output_layer": "output",
    "transformer.encoder.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
QWEN_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "transformer.h.": "blk.",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.w1": "ffn_up",
    "mlp.w2": "ffn_gate",
    "mlp.c_proj": "ffn_down",
}
"""Names of tensors in the vendor's checkpoint → in a GGUF file."""


def vocabulary(config: Any) -> int:
    return int(config.get("padded_vocab_size", config.get("vocab_size")))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_vendors_formulas_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    """Prompts of 120 tokens for those whose tables do not depend on the prompt's length; it is Qwen's original context
    for the others: `test_prompt_tables.py` goes beyond."""
    config, weights = save_vendor(tmp_path, name)
    ids = prompt(40 if name == "qwen" else 120, vocabulary(config))
    expected = torch.from_numpy(vendor_logits(config, weights, ids))
    for num_ranks in (1, 2, 3):
        actual = logits_on_ranks(tmp_path, num_ranks, [ids])[0]
        assert relative_error(actual, expected) < 1e-4, f"{num_ranks} ranks"


@pytest.mark.parametrize("name", ["glm-4", "baichuan-13b"])
def test_compiled_kernels_give_the_same_bits_however_a_prompt_is_cut(name: str, tmp_path: Path) -> None:
    config, weights = save_vendor(tmp_path, name)
    ids = prompt(120, vocabulary(config))
    whole = logits_on_ranks(tmp_path, 2, [ids], backend="cpu")[0]
    assert relative_error(whole, torch.from_numpy(vendor_logits(config, weights, ids))) < 1e-4
    assert torch.equal(whole, logits_on_ranks(tmp_path, 2, [ids], 17, backend="cpu")[0])


@pytest.mark.parametrize("name", ["chatglm3", "qwen", "baichuan2-13b"])
@pytest.mark.parametrize("held", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "a8w8"}])
def test_other_weights_run(name: str, held: dict[str, str], tmp_path: Path) -> None:
    """A normalised head is normalised before it is rounded."""
    config, weights = save_vendor(tmp_path, name)
    ids = prompt(30, vocabulary(config))
    expected = torch.from_numpy(vendor_logits(config, weights, ids))
    assert 0 < relative_error(logits_on_ranks(tmp_path, 1, [ids], backend="cpu", **held)[0], expected) < 0.1


def test_gguf_files_with_fused_tensors_are_read(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them: q, k and v in one tensor, for ChatGLM gate and up, too."""
    config, weights = save_vendor(tmp_path / "chatglm", "chatglm3", hidden_size=72)
    path = _write(tmp_path / "chatglm.gguf", "chatglm", config, weights, CHATGLM_NAMES, turned=6, inner=53, kv_heads=2)
    ids = prompt(60, 131)
    found = logits_on_ranks(path, 2, [ids])[0]
    assert relative_error(found, torch.from_numpy(vendor_logits(config, weights, ids))) < 1e-4

    config, weights = save_vendor(tmp_path / "qwen", "qwen", seq_length=160)
    path = _write(tmp_path / "qwen.gguf", "qwen", config, weights, QWEN_NAMES, turned=12, inner=74, kv_heads=5)
    ids = prompt(60, 97)
    found = logits_on_ranks(path, 2, [ids])[0]
    assert relative_error(found, torch.from_numpy(vendor_logits(config, weights, ids))) < 1e-4


@pytest.mark.parametrize("name", ["qwen", "chatglm3", "baichuan2-13b"])
def test_what_is_converted_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """GGUF files of fused tensors in Q8_0, and a folder whose head is normalised."""
    sizes = {"hidden_size": 64, "kv_channels": 16, "num_attention_heads": 4, "intermediate_size": 192}
    if name == "baichuan2-13b":
        config, weights = save_vendor(source := tmp_path / "folder", name)
    elif name == "qwen":
        config, weights = _rounded(*save_vendor(tmp_path / "folder", name, **sizes, seq_length=160))
        source = _write(tmp_path / "a.gguf", name, config, weights, QWEN_NAMES, turned=16, inner=192, kv_heads=4)
    else:
        config, weights = _rounded(*save_vendor(tmp_path / "folder", name, **sizes, ffn_hidden_size=96))
        source = _write(tmp_path / "a.gguf", "chatglm", config, weights, CHATGLM_NAMES, turned=8, inner=96, kv_heads=2)
    (out := tmp_path / "out").mkdir()
    model = ModelConfig(path=str(source), name="tiny")
    convert(WorkerConfig(model, ServiceConfig(run_dir="/nowhere")), 2, out)
    ids = prompt(30, vocabulary(config))
    expected = torch.from_numpy(vendor_logits(config, weights, ids))
    assert relative_error(logits_on_ranks(source, 2, [ids], quantization="none", dtype="float32")[0], expected) < 1e-4
    found = logits_on_ranks(source, 2, [ids])[0]
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert torch.equal(logits_on_ranks(out, 2, [ids])[0], found)


def test_mistral_within_a_model_of_images_is_read_without_them(tmp_path: Path) -> None:
    """The text's config is nested and its tensors have a beginning of their own, in both spellings."""
    for name, start, head in (
        ("mistral", "language_model.model.", "language_model.lm_head."),
        ("ministral3", "model.language_model.", "lm_head."),
    ):
        folder = tmp_path / name
        model = save_family(folder, FAMILIES[name])
        text = json.loads((folder / "config.json").read_text())
        outer = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}}
        (folder / "config.json").write_text(json.dumps(outer | {"text_config": text}))
        tensors = {
            key.replace("lm_head.", head) if key.startswith("lm_head.") else key.replace("model.", start, 1): values
            for key, values in load_file(folder / "model.safetensors").items()
        }
        images = ("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight", "model.vision_tower.a.weight")
        save_file(tensors | {key: torch.ones(3) for key in images}, folder / "model.safetensors")
        ids = prompt(60, 97)
        assert find_model(str(folder)).family.model_type == name
        assert relative_error(logits_on_ranks(folder, 2, [ids])[0], reference_logits(model, ids)) < 1e-4


@pytest.mark.parametrize("name", ["baichuan-7b", "baichuan-13b"])
def test_the_layers_of_a_gguf_file_of_baichuan_tell_its_positions(name: str, tmp_path: Path) -> None:
    """q and k have the pairs of a head side by side, also where nothing turns them."""
    layers = 40 if name == "baichuan-13b" else 32
    config, weights = save_vendor(
        tmp_path, name, num_hidden_layers=layers, hidden_size=16, num_attention_heads=4, intermediate_size=8
    )
    stored = {}
    for key, values in weights.items():
        if "W_pack" in key:
            start = key.replace("model.layers.", "blk.").split("self_attn")[0]
            q, k, v = np.split(values, 3)
            pairs = {"q": q, "k": k}
            for part, rows in pairs.items():
                stored[f"{start}attn_{part}.weight"] = rows.reshape(4, 2, 2, 16).swapaxes(1, 2).reshape(16, 16)
            stored[f"{start}attn_v.weight"] = v
        else:
            stored[key] = values
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "input_layernorm": "attn_norm",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    path = _write(tmp_path / "model.gguf", "baichuan", config, stored, names, turned=4, inner=8, kv_heads=4)
    ids = prompt(40, 97)
    found = logits_on_ranks(path, 1, [ids])[0]
    assert relative_error(found, torch.from_numpy(vendor_logits(config, weights, ids))) < 1e-4


def _rounded(config: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    """With the matrices that Q8_0 holds."""
    held = {key: np.ascontiguousarray(values, dtype=np.float32) for key, values in weights.items()}
    matrices = {key: gguf.quants.quantize(values, Q8_0) for key, values in held.items() if values.ndim == 2}
    return config, {**weights, **{key: gguf.quants.dequantize(values, Q8_0) for key, values in matrices.items()}}


def _write(
    path: Path,
    architecture: str,
    config: Any,
    weights: Any,
    names: dict[str, str],
    turned: int,
    inner: int,
    kv_heads: int,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(160)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(inner)
    writer.add_block_count(config.get("num_layers", config.get("num_hidden_layers")))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.get("layernorm_epsilon", 1e-6))
    writer.add_rope_dimension_count(turned)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"token{i}" for i in range(2000)])
    writer.add_eos_token_id(2)
    for key, values in weights.items():
        name = key
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        plain = np.ascontiguousarray(values, dtype=np.float32)
        kind = Q8_0 if values.ndim == 2 and values.shape[1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(plain, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("chatglm3", {"position_encoding_2d": True}, "the first ChatGLM-6B is not supported"),
        ("chatglm3", {"vision_config": {"image_size": 1120}}, "vision_config"),
        ("chatglm3", {"quantization_bit": 4}, "quantization_bit 4"),
        ("chatglm3", {"apply_residual_connection_post_layernorm": True}, "post_layernorm true is not supported"),
        ("chatglm3", {"multi_query_attention": False}, "multi_query_attention false is not supported"),
        ("chatglm3", {"rope_ratio": 16, "num_layers": 28, "seq_length": 32768}, "--hf-overrides .*_name_or_path"),
        ("qwen", {"apply_residual_connection_post_layernorm": True}, "post_layernorm true is not supported"),
        ("qwen", {"visual": {"width": 1664}}, "visual"),
        ("qwen", {"intermediate_size": 75}, "intermediate_size 75 is odd"),
        ("baichuan-13b", {"model_max_length": None}, "model_max_length"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    with pytest.raises(CheckpointError, match=message):
        find_model(str(tmp_path))


def test_a_folder_in_mistrals_own_layout_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"params\.json is of Mistral's own layout.*Hugging Face's"):
        find_model(str(tmp_path))


def test_without_a_dtype_in_the_config_the_weights_tell_it(tmp_path: Path) -> None:
    save_vendor(tmp_path, "qwen", torch.bfloat16)
    assert find_model(str(tmp_path)).spec.dtype == "bfloat16"
