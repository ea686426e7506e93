"""What layers may differ in, against transformers: families from outside, made of the project's own blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from allspan.kernels.table import backends
from allspan.protos.config.settings import CacheConfig
from allspan.worker.load.registry import FAMILIES, find_model
from allspan.worker.models.spec_json import spec_json, spec_of
from support.outside_families import OUTSIDE
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 88,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rope_parameters": ROPE,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "hidden_activation": "silu",
        "query_pre_attn_scalar": 40,
        "sliding_window": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE | {"rope_theta": 1e6}},
    },
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
}
IDS = prompt(60, 97)


def save(folder: Path, name: str) -> Any:
    """A random checkpoint in which no norm, bias or rotation is without effect."""
    config = AutoConfig.for_model(name, **SIZES | CONFIGS[name])
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
    model.eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for family in OUTSIDE.values():
        monkeypatch.setitem(FAMILIES, family.model_type, family)
    return str(request.param)


def test_logits_equal_transformers_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    expected = reference_logits(save(tmp_path, name), IDS)
    for num_ranks in (1, 2, 3):
        found = logits_on_ranks(tmp_path, num_ranks, [IDS], chunk=25)[0]
        assert relative_error(found, expected) < 1e-4, f"{num_ranks} ranks"
    if "cpu" in {each.partition("/")[0] for each in backends()}:
        assert relative_error(logits_on_ranks(tmp_path, 2, [IDS], backend="cpu")[0], expected) < 1e-4
    pages = CacheConfig(page_size=16, kv_cache_dtype="int8")
    assert relative_error(logits_on_ranks(tmp_path, 2, [IDS], cache=pages)[0], expected) < 0.1


def test_a_spec_is_the_same_after_json(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    spec = find_model(str(tmp_path)).spec
    assert spec_of(spec_json(spec)) == spec
