"""Quantised experts that are one tensor a layer: logits are those of transformers with what the tensors stand for."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.worker.load import loader
from support.quantised_checkpoints import FORMS, FP8, FP8_BLOCKS, Form, fp8_of_all, fp8_of_blocks, fp8_of_outputs
from support.quantised_experts import FEW, Saved, check_rows, decoded_logits, opened, save_plain

Stack = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""One expert's matrix → its tensors by the ends of their names, and what they stand for."""


def of_form(form: Any, scale: str, mark: str) -> Stack:
    def stack(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, decoded = form(matrix)
        return {"": stored["weight"], mark: stored[scale]}, decoded

    return stack


def dotted(form: Form) -> Stack:
    """Every tensor behind the name of the matrix, as those of an expert's own matrix have it."""

    def stack(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, decoded = form(matrix)
        return {f".{suffix}": tensor for suffix, tensor in stored.items()}, decoded

    return stack


def exponents_of_blocks(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = fp8_of_blocks(matrix)[0]["weight_scale_inv"].log2().ceil().exp2()
    grown = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: matrix.shape[0], : matrix.shape[1]]
    codes = (matrix / grown).to(torch.float8_e4m3fn)
    return {"": codes, "_scale_inv": scales.to(torch.float8_e8m0fnu)}, codes.double() * grown


def halves(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A scale for gate and one for up."""
    parts = [fp8_of_all(half) for half in matrix.chunk(2)]
    scales = torch.stack([stored["weight_scale"] for stored, _ in parts]).unsqueeze(1)
    codes = torch.cat([stored["weight"] for stored, _ in parts])
    return {"": codes, "_scale_inv": scales}, torch.cat([decoded for _, decoded in parts])


def flat_halves(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    stored, decoded = halves(matrix)
    return {"": stored[""], "_scale": stored["_scale_inv"].flatten()}, decoded


STACKS: dict[str, tuple[Stack, dict[str, Any]]] = {
    "tensors": (of_form(fp8_of_all, "weight_scale", "_scale"), FP8),
    "halves": (halves, FP8),
    "flat halves": (flat_halves, FP8),
    "outputs": (of_form(fp8_of_outputs, "weight_scale", "_scale"), FP8),
    "blocks": (of_form(fp8_of_blocks, "weight_scale_inv", "_scale_inv"), FP8_BLOCKS),
    "exponents": (exponents_of_blocks, FP8_BLOCKS),
}
DOTTED = ("gptq", "gptq-ordered", "awq", "compressed-int8-alone", "compressed-int4")
"""Those of FORMS that are stacked, too."""
STACKS |= {name: (dotted(FORMS[name][0]), FORMS[name][1]) for name in DOTTED}


def save_stacked(folder: Path, name: str, suffix: str = "") -> Saved:
    """Experts in one tensor a layer, gate above up."""
    plain = save_plain(folder, "qwen3_moe", num_experts=5)
    stack, config = STACKS[name]
    tensors = {key: each for key, each in plain.items() if ".experts." not in key}
    decoded: dict[str, Tensor] = {}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts."
        for roles in (("gate", "up"), ("down",)):
            stored: list[dict[str, Tensor]] = []
            for expert in range(5):
                names = [f"{stem}{expert}.{role}_proj.weight" for role in roles]
                parts, values = stack(torch.cat([plain[each] for each in names]))
                stored.append(parts)
                decoded |= dict(zip(names, torch.split(values, [len(plain[each]) for each in names]), strict=True))
            fused = f"{stem}{'_'.join(roles)}_proj{suffix}"
            tensors |= {fused + end: torch.stack([each[end] for each in stored]) for end in stored[0]}
            if name == "compressed-int4":  # one shape for all
                tensors[f"{fused}.weight_shape"] = torch.tensor([5, *values.shape])
            tensors[f"{stem}{'_'.join(roles)}_proj_activation_scale"] = torch.ones(5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return Saved(folder, name, decoded_logits(folder, plain | decoded), decoded)


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a checkpoint of one of STACKS, once."""
    return functools.cache(lambda name: save_stacked(tmp_path_factory.mktemp("stacked"), name).path)


@pytest.mark.parametrize(("name", "suffix"), [*((name, "") for name in STACKS), ("blocks", ".weight")])
def test_matrices_of_all_experts_may_be_one_tensor(
    name: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_stacked(tmp_path, name, suffix)
    for ranks, groups in FEW:
        assert saved.error(ranks, groups, dtype="float32", backend="cpu") < (0.01 if name in DOTTED else 1e-4)
    monkeypatch.setattr(loader, "memory_of", lambda device, dtype: "rows")
    check_rows(saved, 4, 0)


@pytest.mark.parametrize(
    ("form", "changes", "says"),
    [
        ("blocks", {"down_proj_scale_inv": None}, "down_proj' has dtype F8_E4M3, and there are no scales"),
        (
            "blocks",
            {"down_proj_scale_inv": torch.ones(5, 3, 3)},
            r"down_proj' .*\[5, 3, 3\].*: expert 0: the scales are neither one for all.* have \[2, 3\]",
        ),
        (
            "blocks",
            {"down_proj": torch.zeros(4, 160, 288).to(torch.float8_e4m3fn)},
            "down_proj' .*: weight_scale_inv is not of 4 experts, as weight is",
        ),
        ("blocks", {"4.down_proj.weight": torch.zeros(160, 288)}, "4.down_proj.weight' is not part of the model"),
        ("awq", {"down_proj.scales": None}, "down_proj' .*: expert 0: it has no 'scales'"),
        ("awq", {"down_proj.qweight": None, "down_proj.scales": None}, "down_proj.qzeros' .*the codes of its matrix"),
        ("awq", {"4.down_proj.weight": torch.zeros(160, 288)}, "4.down_proj.weight' is not part of the model"),
        ("awq", {"down_proj.qzeros": torch.zeros(4, 9, 20).int()}, "down_proj' .*: qzeros is not of 5 experts, as q"),
        (
            "awq",
            {"down_proj.scales": torch.zeros(5, 9, 152).half()},
            "down_proj' .*: expert 0: the zeros or the scales are not those of the weights",
        ),
        (
            "gptq",
            {"gate_up_proj.g_idx": torch.full((5, 160), 9).int()},
            "gate_up_proj' .*: expert 0: inputs are in groups 9 to 9, must be in 0 to 4",
        ),
        ("awq", {"down_proj.qweight": torch.zeros(5, 288, 20)}, "down_proj' .*: qweight is torch.float32, must be tor"),
        ("compressed-int4", {"down_proj.weight_shape": None}, "down_proj' .*: expert 0: it has no 'weight_shape'"),
    ],
)
def test_wrong_experts_in_one_tensor_are_refused_by_name(
    form: str, changes: dict[str, Tensor | None], says: str, tmp_path: Path, stacked: Callable[[str], Path]
) -> None:
    tensors = load_file(stacked(form) / "model.safetensors")
    shutil.copy(stacked(form) / "config.json", tmp_path)
    for name, value in changes.items():
        tensors.pop(f"model.layers.1.mlp.experts.{name}", None)
        if value is not None:
            tensors[f"model.layers.1.mlp.experts.{name}"] = value
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        loader.open_weights(*opened(tmp_path))
