"""Rotary tables against transformers', at long positions too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from allspan.worker.load.registry import find_model
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.rope import RotarySpec, cos_sin_table
from allspan.worker.step.row_inputs import RowInputs

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": YARN,
    "yarn, own attention factor": YARN | {"attention_factor": 1.5},
    "yarn, own betas, not truncated": YARN | {"beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
    "yarn, mscale": YARN | {"mscale": 1.2, "mscale_all_dim": 0.8},
    "yarn, original context from the model's": {"rope_type": "yarn", "factor": 2.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers(kind: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters=KINDS[kind] | {"rope_theta": 20000.0},
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    attention = find_model(str(tmp_path)).spec.layers[0].attention
    assert isinstance(attention, Gqa)
    positions = torch.arange(4096)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions)
    table = cos_sin_table(attention.rotary, attention.head_dim, 4096)
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1)
    assert table.shape == (4096, 64)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-6)


def test_tables_by_the_length_of_prompts_stretch_the_base_by_doublings_of_the_context() -> None:
    """Qwen 1's dynamic NTK: base · α^(d / (d - 2)), α 1 up to the original context, then 3, 7 … with its doublings."""
    rotary = RotarySpec(10000.0, "by_prompt", original_max_position_embeddings=40)
    assert rotary.prompt_lengths(40) == ()
    assert rotary.prompt_lengths(100) == (40, 80)
    chosen = RowInputs(prompt_lengths=rotary.prompt_lengths(100))
    assert [chosen.table_of(length) for length in (1, 40, 41, 80, 81, 100)] == [0, 0, 1, 1, 2, 2]
    tables = cos_sin_table(rotary, 16, 100).split(100)
    assert len(tables) == 3
    for alpha, table in zip((1, 3, 7), tables, strict=True):
        expected = cos_sin_table(RotarySpec(10000.0 * alpha ** (16 / 14)), 16, 100)
        torch.testing.assert_close(table, expected, rtol=0, atol=1e-6)
