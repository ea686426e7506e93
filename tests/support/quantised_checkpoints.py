"""Checkpoints of `save_tiny` rewritten as the tools of others quantise them, and what their weights then are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
    tensors = load_file(path)
    matrices = [each for each, values in tensors.items() if re.search(r"\.\d+\..*\.weight$", each) and values.ndim == 2]
    for name in [each for each in matrices if not any(part in each for part in kept)]:
        stored, decoded[name] = form(tensors.pop(name).float())
        made = {name.removesuffix("weight") + suffix: value for suffix, value in stored.items()}
        tensors = made | tensors  # a bias that the layer has stays
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


@dataclass(frozen=True)
class Whole:
    """Integers of `bits`, in groups of inputs (-1: all), the inputs of a group next to each other or not."""

    bits: int = 4
    group: int = -1
    is_symmetric: bool = False
    is_ordered: bool = False
    is_irregular: bool = False
    seed: int = 0
    """Of the order."""

    def quantise(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """codes [out, in], zeros and scales (float16) [out, groups], and the group of each input."""
        inputs, most = weight.shape[1], (1 << self.bits) - 1
        size = inputs if self.group == -1 else self.group
        group_of = torch.arange(inputs) // size
        if self.is_ordered:
            group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs + self.seed))]
        if self.is_irregular:
            group_of[:3] = 0
        scales, zeros = (torch.empty(len(weight), -(-inputs // size)) for _ in range(2))
        codes = torch.empty_like(weight)
        for group in range(scales.shape[1]):
            mine = weight[:, group_of == group]
            low, high = mine.amin(1, keepdim=True).clamp(max=0), mine.amax(1, keepdim=True).clamp(min=0)
            if self.is_symmetric:
                high = mine.abs().amax(1, keepdim=True)
                low = -high
            scale = ((high - low) / most).half().float()
            zero = (-low / scale).round().clamp(0, most)
            if self.is_symmetric:
                zero = torch.full_like(scale, (most + 1) / 2)
            codes[:, group_of == group] = (mine / scale + zero).round().clamp(0, most)
            scales[:, group], zeros[:, group] = scale[:, 0], zero[:, 0]
        return codes, zeros, scales, group_of


def decode(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    return (codes.double() - zeros.double()[:, group_of]) * scales.double()[:, group_of]


def in_words(codes: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """int32 [n, m · bits / 32] of codes [n, m]; `order` are the codes of a word from its lowest bits on."""
    each = 32 // bits
    words = codes.long().reshape(len(codes), -1, each)[:, :, list(order) or list(range(each))]
    values = (words << torch.arange(0, 32, bits)).sum(2)
    return torch.where(values >= 1 << 31, values - (1 << 32), values).int()


def gptq(what: Whole, weight: Tensor, lack: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """With a bias of zeros, as some tools write it."""
    codes, zeros, scales, group_of = what.quantise(weight)
    stored = {
        "qweight": in_words(codes, what.bits).T,
        "qzeros": in_words((zeros.T - lack) % (1 << what.bits), what.bits),
        "scales": scales.T.half(),
        "g_idx": group_of.int(),
        "bias": torch.zeros(len(weight), dtype=torch.float16),
    }
    return stored, decode(codes, zeros, scales, group_of)


def awq(what: Whole, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, group_of = what.quantise(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "qweight": in_words(codes.T, 4, order),
        "qzeros": in_words(zeros.T, 4, order),
        "scales": scales.T.half(),
    }
    return stored, decode(codes, zeros, scales, group_of)


def packed(what: Whole, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, group_of = what.quantise(weight)
    stored = {
        "weight_packed": in_words(codes, what.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not what.is_symmetric:
        stored["weight_zero_point"] = in_words(zeros.T, what.bits).T
    if what.is_ordered:
        stored["weight_g_idx"] = group_of.int()
    return stored, decode(codes, zeros, scales, group_of)


def int8(what: Whole, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, group_of = what.quantise(weight)
    stored = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    if not what.is_symmetric:
        stored["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return stored, decode(codes, zeros, scales, group_of)


def compressed(name: str, inputs: int = 0, **weights: Any) -> dict[str, Any]:
    """The config of compressed-tensors; `inputs`: bits of activations."""
    activations = {"num_bits": inputs, "dynamic": True, "strategy": "token"} if inputs else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}


def gptq_config(what: Whole, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": what.bits, "group_size": what.group, "desc_act": what.is_ordered, **more}


FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

FORMS: dict[str, tuple[Form, dict[str, Any]]] = {
    "fp8": (fp8_of_all, FP8),
    "fp8-blocks": (fp8_of_blocks, FP8_BLOCKS),
    "compressed-fp8": (fp8_of_outputs, compressed("float-quantized", 8, num_bits=8, type="float", strategy="channel")),
    "compressed-int8": (partial(int8, Whole(8, is_symmetric=True)), compressed("int-quantized", 8, num_bits=8)),
    "compressed-int8-alone": (partial(int8, Whole(8, 64)), compressed("int-quantized", num_bits=8, group_size=64)),
    "compressed-int4": (
        partial(packed, Whole(4, 32, is_symmetric=True)),
        compressed("pack-quantized", num_bits=4, group_size=32),
    ),
    "compressed-int4-ordered": (
        partial(packed, Whole(4, 64, is_ordered=True)),
        compressed("pack-quantized", num_bits=4, group_size=64, actorder="group"),
    ),
    "awq": (partial(awq, Whole(4, 32)), AWQ),
    "gptq": (partial(gptq, Whole(4, 32, is_symmetric=True)), gptq_config(Whole(4, 32))),
    "gptq-channel": (partial(gptq, Whole()), gptq_config(Whole())),
    "gptq-8-bits": (partial(gptq, Whole(8, 128)), gptq_config(Whole(8, 128))),
    "gptq-v2": (partial(gptq, Whole(4, 64), lack=0), gptq_config(Whole(4, 64), checkpoint_format="gptq_v2")),
    "gptq-ordered": (partial(gptq, Whole(4, 64, is_ordered=True)), gptq_config(Whole(4, 64, is_ordered=True))),
    "gptq-irregular": (
        partial(gptq, Whole(4, 32, is_ordered=True, is_irregular=True)),
        gptq_config(Whole(4, 32, is_ordered=True)),
    ),
}
