"""A tiny gpt-oss whose experts are in MXFP4, as its folders have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from support.family_rows import FAMILIES, save_family

ROW = FAMILIES["gpt_oss"]
EXPERTS = "model.layers.{}.mlp.experts.{}_proj"


def save_mxfp4(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Writes a folder with experts in MXFP4; transformers' model with the values that it decodes, and the blocks and
    scales."""
    model, generator = save_family(folder, ROW), torch.Generator().manual_seed(1)
    tensors, codes = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for layer, block in enumerate(model.model.layers):
        for part in ("gate_up", "down"):
            stem, parameter = EXPERTS.format(layer, part), getattr(block.mlp.experts, f"{part}_proj")
            count, inputs, outputs = parameter.shape
            shape = (count, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
            codes |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
            del tensors[stem]
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file({**tensors, **codes}, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    return model, codes
