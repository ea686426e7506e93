"""What runs of each family: formats of weights and pages on a device, as a table in the docs has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from allspan import Engine, SamplingParams
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.worker.load.registry import FAMILIES as FAMILY_TABLE
from support.family_rows import FAMILIES, save_family
from support.tiny_models import prompt, reference_logits
from support.vendor_models import save_vendor, vendor_logits

TABLE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
DEVICES = ("CPU", "CUDA, emulated", "GPU")
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "uint4": {"dtype": "bfloat16", "quantization": "uint4", "kv_cache_dtype": "uint4"},
}
"""Weights and pages alike."""
CLOSE = {"float32": 0.001, "bf16": 0.1, "int8": 0.2, "uint4": 1.5}
"""How far the log probability of a token may be from the reference's, at the median: by format."""
SETTINGS: dict[str, Any] = {
    "max_model_len": 160,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "kv_cache_bytes": 4_000_000,
}
IDS = prompt(80, 97)
_ROWS = {row.model_type: name for name, row in reversed(FAMILIES.items())}
"""Model type → the first row of it."""
_HEADS = {"hidden_size": 64, "num_attention_heads": 4}
_VENDORS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("qwen", {**_HEADS, "kv_channels": 16, "intermediate_size": 176}),
    "chatglm": ("glm-4", {**_HEADS, "kv_channels": 16, "ffn_hidden_size": 88}),
    "baichuan": ("baichuan-13b", {**_HEADS, "intermediate_size": 88}),
}
"""Model type that transformers has no class for → its config, and what differs here."""
MODEL_TYPES = tuple(FAMILY_TABLE)


def cell(folder: Path, model_type: str, on: dict[str, Any]) -> str:
    """The formats that run, or why one does not; AssertionError for one that runs and is wrong."""
    likely = _logits(folder, model_type).log_softmax(1)[range(len(IDS) - 1), IDS[1:]]
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    found = []
    for name, settings in FORMATS.items():
        try:
            with Engine(folder, **on, **SETTINGS | settings) as engine:
                (output,) = engine.generate([IDS], params)
        except (ConfigError, CheckpointError) as error:
            found.append(f"{name} is refused: {re.sub(r'[^ ]*/', '', str(error))}")
            continue
        told = torch.tensor([entry.logprob for entry in output.prompt_logprobs])
        off = float((told - likely).abs().median())
        assert off < CLOSE[name], f"{model_type} in {name}: log probabilities are {off:.3f} off"
        found.append(name)
    return ", ".join(found)


def _logits(folder: Path, model_type: str) -> torch.Tensor:
    """Writes a tiny model of the family; what transformers, or its vendor's formulas, make of IDS."""
    if model_type not in _VENDORS:
        return reference_logits(save_family(folder, FAMILIES[_ROWS[model_type]]), IDS)
    name, changes = _VENDORS[model_type]
    config, weights = save_vendor(folder, name, **changes)
    return torch.from_numpy(vendor_logits(config, weights, IDS)).float()


def written(model_type: str, device: str) -> str:
    """What the docs say of a family on a device."""
    column = 2 + DEVICES.index(device)
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [each.strip() for each in line.strip("|").split("|")]
        if len(cells) > column and f"`{model_type}`" in cells[1]:
            return cells[column]
    return "(no row)"
