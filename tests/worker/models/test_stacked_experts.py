"""Quantised experts that are one tensor a layer: logits are those of transformers with what the tensors stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.worker.load import loader
from support.quantised_checkpoints import FP8, FP8_BLOCKS, fp8_of_all, fp8_of_blocks, fp8_of_outputs
from support.quantised_experts import FEW, Saved, check_rows, decoded_logits, opened, save_plain

Stack = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""One expert's matrix → its codes and scales, and what they stand for."""


def of_form(form: Any, scale: str) -> Stack:
    def stack(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stored, decoded = form(matrix)
        return stored["weight"], stored[scale], decoded

    return stack


def exponents_of_blocks(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = fp8_of_blocks(matrix)[0]["weight_scale_inv"].log2().ceil().exp2()
    grown = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: matrix.shape[0], : matrix.shape[1]]
    codes = (matrix / grown).to(torch.float8_e4m3fn)
    return codes, scales.to(torch.float8_e8m0fnu), codes.double() * grown


def halves(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A scale for gate and one for up."""
    parts = [fp8_of_all(half) for half in matrix.chunk(2)]
    scales = torch.stack([stored["weight_scale"] for stored, _ in parts]).unsqueeze(1)
    return torch.cat([stored["weight"] for stored, _ in parts]), scales, torch.cat([decoded for _, decoded in parts])


def flat_halves(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, decoded = halves(matrix)
    return codes, scales.flatten(), decoded


STACKS: dict[str, tuple[Stack, str, dict[str, Any]]] = {
    "tensors": (of_form(fp8_of_all, "weight_scale"), "_scale", FP8),
    "halves": (halves, "_scale_inv", FP8),
    "flat halves": (flat_halves, "_scale", FP8),
    "outputs": (of_form(fp8_of_outputs, "weight_scale"), "_scale", FP8),
    "blocks": (of_form(fp8_of_blocks, "weight_scale_inv"), "_scale_inv", FP8_BLOCKS),
    "exponents": (exponents_of_blocks, "_scale_inv", FP8_BLOCKS),
}


def save_stacked(folder: Path, name: str, suffix: str = "") -> Saved:
    """Experts in one tensor a layer, gate above up."""
    plain = save_plain(folder, "qwen3_moe", num_experts=5)
    stack, mark, config = STACKS[name]
    tensors = {key: each for key, each in plain.items() if ".experts." not in key}
    decoded: dict[str, Tensor] = {}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts."
        for roles in (("gate", "up"), ("down",)):
            codes, scales = [], []
            for expert in range(5):
                names = [f"{stem}{expert}.{role}_proj.weight" for role in roles]
                code, scale, values = stack(torch.cat([plain[each] for each in names]))
                codes.append(code)
                scales.append(scale)
                decoded |= dict(zip(names, torch.split(values, [len(plain[each]) for each in names]), strict=True))
            fused = f"{stem}{'_'.join(roles)}_proj{suffix}"
            tensors |= {fused: torch.stack(codes), fused + mark: torch.stack(scales)}
            tensors[f"{stem}{'_'.join(roles)}_proj_activation_scale"] = torch.ones(5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return Saved(folder, "fp8", decoded_logits(folder, plain | decoded), decoded)


@pytest.mark.parametrize(("name", "suffix"), [*((name, "") for name in STACKS), ("blocks", ".weight")])
def test_fp8_of_all_experts_may_be_one_tensor(
    name: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_stacked(tmp_path, name, suffix)
    for ranks, groups in FEW:
        assert saved.error(ranks, groups, dtype="float32", backend="cpu") < 1e-4
    monkeypatch.setattr(loader, "memory_of", lambda device, dtype: "rows")
    check_rows(saved, 4, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"down_proj_scale_inv": None}, "down_proj' has dtype F8_E4M3, and there are no scales"),
        ({"down_proj_scale_inv": torch.ones(5, 3, 3)}, r"down_proj' .*neither one an expert.*\[5, 3, 3\], where"),
        ({"down_proj": torch.zeros(4, 160, 288).to(torch.float8_e4m3fn)}, "down_proj' .*neither one an expert"),
        ({"4.down_proj.weight": torch.zeros(160, 288)}, "4.down_proj.weight' is not part of the model"),
    ],
)
def test_wrong_experts_in_one_tensor_are_refused_by_name(
    changes: dict[str, Tensor | None], says: str, tmp_path: Path
) -> None:
    save_stacked(tmp_path, "blocks")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        tensors.pop(f"model.layers.1.mlp.experts.{name}", None)
        if value is not None:
            tensors[f"model.layers.1.mlp.experts.{name}"] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        loader.open_weights(*opened(tmp_path))
