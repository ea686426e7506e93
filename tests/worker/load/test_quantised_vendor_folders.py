"""Quantised folders of families whose checkpoints hold q, k and v, or gate and up, in one matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from allspan.protos.api.errors import CheckpointError
from allspan.worker.load import loader
from allspan.worker.load.loader import open_checkpoint
from allspan.worker.load.registry import find_model
from support.quantised_checkpoints import FORMS, quantise_folder
from support.tiny_models import logits_on_ranks, prompt, relative_error
from support.vendor_models import Config, Weights, save_vendor, vendor_logits

QWEN = {"hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16, "intermediate_size": 192}
CHATGLM = {"hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16, "ffn_hidden_size": 96}
BAICHUAN = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
IDS = prompt(30, 97)


def save(folder: Path, name: str, form: str, **sizes: Any) -> tuple[Config, Weights]:
    """With zero biases where the model has none, as GPTQ's tools write them. Returns what the tensors stand for."""
    config, weights = save_vendor(folder, name, **sizes)
    make, described = FORMS[form]

    def biased(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        stored, decoded = make(weight)
        return ({"bias": torch.zeros(len(weight))} if form.startswith("gptq") else {}) | stored, decoded

    decoded = quantise_folder(folder, biased, described)
    assert len(decoded) == 4 * (5 if name == "qwen" or name.startswith("baichuan") else 4)
    return config, {**weights, **{key: values.numpy() for key, values in decoded.items()}}


@pytest.mark.parametrize(
    ("name", "form", "sizes"),
    [
        ("qwen", "gptq", QWEN),
        ("qwen", "gptq-ordered", QWEN),
        ("chatglm3", "gptq-8-bits", CHATGLM),
        ("chatglm3", "awq", CHATGLM),
        ("baichuan-13b", "awq", BAICHUAN),
        ("baichuan2-13b", "gptq", BAICHUAN | {"hidden_size": 32, "num_attention_heads": 2}),
    ],
)
def test_fused_matrices_are_what_their_tensors_stand_for(
    name: str, form: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded, in panels, and on two ranks in rows, as on a GPU; rows of ChatGLM's heads are reordered, too."""
    config, weights = save(tmp_path, name, form, **sizes)
    expected = torch.from_numpy(vendor_logits(config, weights, IDS))

    def error(ranks: int, **held: Any) -> float:
        return relative_error(logits_on_ranks(tmp_path, ranks, [IDS], **held)[0], expected)

    assert error(3 if name == "qwen" else 2, quantization="none", dtype="float32") < 1e-4
    assert error(1, dtype="float32") < 0.01
    monkeypatch.setattr(loader, "memory_of", lambda device, dtype: "rows")
    assert error(2, dtype="bfloat16") < 0.1


def test_gptq_tensors_of_a_bin_file_are_read(tmp_path: Path) -> None:
    config, weights = save(tmp_path, "qwen", "gptq", **QWEN)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    expected = torch.from_numpy(vendor_logits(config, weights, IDS))
    assert relative_error(logits_on_ranks(tmp_path, 1, [IDS], quantization="none")[0], expected) < 1e-4


def test_chatglms_own_packing_is_refused_even_if_its_config_is_silent(tmp_path: Path) -> None:
    """Two codes of 4 bits in a byte, and scales beside them; `quantization_bit` is refused already."""
    save_vendor(tmp_path, "chatglm3", **CHATGLM)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "transformer.encoder.layers.0.mlp.dense_4h_to_h.weight"
    tensors[name] = torch.zeros(64, 48, dtype=torch.int8)
    save_file(tensors | {f"{name}_scale": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weight_scale' is of a quantised checkpoint, and there is no"):
        open_checkpoint(find_model(str(tmp_path)), "auto")


@pytest.mark.parametrize("described", [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}])
def test_a_config_of_bitsandbytes_is_refused_by_its_name(described: dict[str, Any], tmp_path: Path) -> None:
    """As Baichuan2's folders of 4 bits have it, without `quant_method`."""
    config, _ = save_vendor(tmp_path, "baichuan-13b")
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    with pytest.raises(CheckpointError, match=r"\(bitsandbytes\) is not supported .*take the model that is not quant"):
        find_model(str(tmp_path))
