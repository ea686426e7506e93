"""Checkpoints of `save_tiny` rewritten as the tools of others quantise them, and what their weights then are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn

Form = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""weight float32 [out, in] → its tensors by suffix, and float64 [out, in], what they stand for."""


def quantise_folder(folder: Path, form: Form, config: dict[str, Any], kept: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Replaces the matrices of all layers but those whose names contain one of `kept`. Returns what they stand for, by
    the name that they had."""
    path, decoded = folder / "model.safetensors", {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if "_proj.weight" in name and not any(each in name for each in kept):
            stored, decoded[name] = form(tensor.float())
            tensors |= {name.removesuffix("weight") + suffix: value for suffix, value in stored.items()}
        else:
            tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(described))
    return decoded


def fp8_of_all(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A scale for all, and one for inputs that were seen."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(E4M3)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    return stored, codes.double() * scale.double()


def fp8_of_outputs(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """In bfloat16, as compressed-tensors has them."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).to(E4M3)
    return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()


def fp8_of_blocks(weight: Tensor, tall: int = 128, wide: int = 128) -> tuple[dict[str, Tensor], Tensor]:
    codes, decoded = torch.empty_like(weight, dtype=E4M3), torch.empty_like(weight, dtype=torch.float64)
    scales = torch.empty(-(-weight.shape[0] // tall), -(-weight.shape[1] // wide))
    for at, rows, columns in _blocks(weight, tall, wide):
        scales[at] = weight[rows, columns].abs().max() / 448
        codes[rows, columns] = (weight[rows, columns] / scales[at]).to(E4M3)
        decoded[rows, columns] = codes[rows, columns].double() * scales[at].double()
    return {"weight": codes, "weight_scale_inv": scales}, decoded


def _blocks(weight: Tensor, tall: int, wide: int) -> Iterator[tuple[tuple[int, int], slice, slice]]:
    for i in range(0, weight.shape[0], tall):
        for j in range(0, weight.shape[1], wide):
            yield (i // tall, j // wide), slice(i, i + tall), slice(j, j + wide)


FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
COMPRESSED_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}

FORMS: dict[str, tuple[Form, dict[str, Any]]] = {
    "fp8": (fp8_of_all, FP8),
    "fp8-blocks": (fp8_of_blocks, FP8_BLOCKS),
    "compressed-fp8": (fp8_of_outputs, COMPRESSED_FP8),
}
