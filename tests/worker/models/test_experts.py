"""Weights with an expert dimension, and how they split: a block from outside against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from allspan.kernels.table import BACKENDS, Backend
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load.loader import prepare
from allspan.worker.load.registry import FAMILIES
from allspan.worker.models.layout import layout
from support.outside_moe import BY_EXPERT, STACKED, qwen3_moe
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
IDS = prompt(30, 97)


def save(folder: Path) -> Any:
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
    model.eval()
    model.save_pretrained(folder)
    return model


def stack_experts(folder: Path) -> None:
    """Every layer's experts in one tensor each for gate and up, and for down."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        own = [
            {name: tensors.pop(f"{prefix}{expert}.{name}_proj.weight") for name in ("gate", "up", "down")}
            for expert in range(SIZES["num_experts"])
        ]
        tensors[prefix + "gate_up_proj"] = torch.stack([torch.cat((each["gate"], each["up"])) for each in own])
        tensors[prefix + "down_proj"] = torch.stack([each["down"] for each in own])
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(autouse=True)
def _ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "toy", Backend({"experts": "support.outside_moe:experts"}))


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_logits_equal_transformers_however_experts_are_named_and_split(
    slices: bool, is_stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "qwen3_moe", qwen3_moe(STACKED if is_stacked else BY_EXPERT, slices))
    expected = reference_logits(save(tmp_path), IDS)
    if is_stacked:
        stack_experts(tmp_path)
    for num_ranks in (1, 2, 3):
        found = logits_on_ranks(tmp_path, num_ranks, [IDS], backend="toy")[0]
        assert relative_error(found, expected) < 1e-4, f"{num_ranks} ranks"


def test_each_rank_holds_its_own_experts_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "qwen3_moe", qwen3_moe(BY_EXPERT, slices=False))
    save(tmp_path)
    held = []
    for rank in range(2):
        holding = prepare(ModelConfig(str(tmp_path), "tiny"), CacheConfig(), rank, 2).holding
        tensors = {name: each for piece in layout(holding.spec) for name, each in holding.tensors(piece).items()}
        held.append(tensors["layers.0.expert_down.weight"].shape)
    assert [shape[0] for shape in held] == [3, 2]
    assert held[0][1:] == held[1][1:]
