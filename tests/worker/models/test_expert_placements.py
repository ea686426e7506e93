"""Models whose ranks hold experts where the configuration places them: copies and loads change no logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load.loader import prepare
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 56,
    "num_experts_per_tok": 4,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
IDS = prompt(40, 97)
WHOLE: dict[str, Any] = {"enable_expert_parallel": True}


def save(folder: Path, experts: int) -> Tensor:
    """A random model and a file of loads, in which the later experts have had most tokens; the logits that
    transformers gives."""
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **SIZES, num_experts=experts))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
    model.eval()
    model.save_pretrained(folder)
    tokens = [(expert + 1) ** 2 for expert in range(experts)]
    told = {"ready": True, "experts": [{"layer": layer, "tokens": tokens, "hottest": 5} for layer in (0, 1)]}
    (folder / "loads.json").write_text(json.dumps(told))
    return reference_logits(model, IDS)


def held(folder: Path, size: int, **settings: Any) -> list[tuple[int, ...]]:
    config = replace(ModelConfig(str(folder), "tiny"), **WHOLE | settings)
    return list(prepare(config, CacheConfig(), 0, size).holding.placements[1].groups)


@pytest.mark.parametrize(("ranks", "groups"), [(2, 2), (4, 4), (4, 2)])
def test_copies_of_experts_on_several_ranks_change_no_logits(ranks: int, groups: int, tmp_path: Path) -> None:
    expected = save(tmp_path, 6)
    copies = WHOLE | {
        "expert_parallel_size": groups,
        "redundant_experts": 2,
        "expert_load": str(tmp_path / "loads.json"),
    }
    assert held(tmp_path, ranks, **copies) != held(tmp_path, ranks, expert_parallel_size=groups, redundant_experts=2)
    (alone,) = logits_on_ranks(tmp_path, ranks, [IDS], backend="cpu", **copies)
    assert relative_error(alone, expected) < 1e-4
    among = logits_on_ranks(tmp_path, ranks, [IDS[:9], IDS], chunk=7, backend="cpu", **copies)[1]
    assert torch.equal(alone, among), "a token's copies follow from its own choices"


def test_sixty_experts_over_eight_ranks_are_seven_and_eight_a_rank(tmp_path: Path) -> None:
    expected = save(tmp_path, 60)
    assert [len(group) for group in held(tmp_path, 8)] == [8] * 4 + [7] * 4
    balanced = {"redundant_experts": 4, "expert_load": str(tmp_path / "loads.json")}
    groups = held(tmp_path, 8, **balanced)
    assert [len(group) for group in groups] == [8] * 8
    assert sum(59 in group for group in groups) > 1
    for settings in ({}, balanced):
        found = logits_on_ranks(tmp_path, 8, [IDS], backend="cpu", **WHOLE | settings)[0]
        assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize(
    ("size", "settings", "says"),
    [
        (2, {"enable_expert_parallel": False, "redundant_experts": 2}, "redundant_experts is 2 without --enable-exp"),
        (2, {"redundant_experts": 7}, "redundant_experts is 7, must be at most 6"),
        (8, {}, "expert_parallel_size is 8, must divide the 8 ranks and be at most the 6 experts"),
        (2, {"expert_load": "missing.json"}, "expert_load missing.json: cannot be read: No such"),
        (
            2,
            {"expert_load": "loads.json", "expert_nodes": 1, "hf_overrides": '{"num_experts": 5}'},
            "for each of its 5",
        ),
    ],
)
def test_placements_that_cannot_be_are_refused(
    size: int, settings: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 6)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        held(tmp_path, size, **settings)


@pytest.mark.parametrize(
    "told", ['{"ranks": []}', '[{"layer": 0, "tokens": [1, -1]}]', '[{"layer": 0, "tokens": ["a"]}]', "[1"]
)
def test_files_that_tell_no_loads_are_refused(told: str, tmp_path: Path) -> None:
    save(tmp_path, 6)
    (tmp_path / "loads.json").write_text(told)
    with pytest.raises(ConfigError, match=r"loads\.json: "):
        held(tmp_path, 2, expert_load=str(tmp_path / "loads.json"))
