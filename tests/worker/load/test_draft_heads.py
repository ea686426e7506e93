"""Draft heads as they are published: what is read, what is refused by name, and what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load.draft_heads import PreparedHead, prepare_eagle3, prepare_mtp
from allspan.worker.load.loader import prepare
from support.draft_heads import save_eagle3
from support.tiny_models import save_tiny

LAYERS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_tiny(folder, "llama2", num_hidden_layers=LAYERS, hidden_size=60, num_attention_heads=6, num_key_value_heads=6)
    return folder


def eagle3(target: Path, head: Path, size: int = 1, quantization: str = "none", **settings: Any) -> PreparedHead:
    config = ModelConfig(str(target), "tiny", **settings)
    return prepare_eagle3(str(head), config, prepare(config, CacheConfig(), 0, size), quantization)


def test_ids_of_the_head_are_mapped_to_those_of_its_target(target: Path, tmp_path: Path) -> None:
    state = save_eagle3(tmp_path, 97, 40)
    head = eagle3(target, tmp_path)
    assert head.target_ids is not None
    assert torch.from_numpy(head.target_ids).tolist() == state["t2d"].nonzero()[:, 0].tolist()


def test_a_head_that_has_all_ids_needs_no_map(target: Path, tmp_path: Path) -> None:
    save_eagle3(tmp_path, 97, 97)
    file = tmp_path / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if name not in ("d2t", "t2d")}, file)
    assert eagle3(target, tmp_path).target_ids is None


def test_a_head_as_its_authors_saved_it_is_read_without_unpickling(target: Path, tmp_path: Path) -> None:
    save_eagle3(tmp_path, 97, 40)
    file = tmp_path / "model.safetensors"
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    expected = eagle3(target, tmp_path)
    file.unlink()
    found = eagle3(target, tmp_path)
    assert found.spec == expected.spec
    assert found.target_ids is not None
    assert expected.target_ids is not None
    assert found.target_ids.tolist() == expected.target_ids.tolist()


def test_random_weights_need_no_files_of_the_head_but_its_config(target: Path, tmp_path: Path) -> None:
    save_eagle3(tmp_path, 97, 40)
    (tmp_path / "model.safetensors").unlink()
    assert eagle3(target, tmp_path, load_format="dummy").weight_bytes > 0


def test_a_rank_holds_its_share_of_the_layer_and_all_of_the_first_product(target: Path, tmp_path: Path) -> None:
    save_eagle3(tmp_path, 97, 40)
    whole, half = (eagle3(target, tmp_path, size).weight_bytes for size in (1, 2))
    assert 0.5 < half / whole < 0.8
    assert eagle3(target, tmp_path, quantization="int8").weight_bytes < 0.5 * whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported for a head"),
        ({"model_type": "qwen3"}, "model_type 'qwen3' is not supported for a head"),
        ({"fc_norm": True}, "fc_norm true is not supported"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types \['sliding_attention'\] is not supported for a head"),
        ({"layer_types": 5}, "layer_types 5 is not supported for a head"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false is not supported"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm true is not supported .supported: false"),
        ({"speculators_model_type": "mlp"}, "speculators_model_type 'mlp' is not supported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "must be numbers from 0 to 5"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, but the model's hidden_size is 60"),
        ({"hidden_size": 30}, "hidden_size is 30, and the head has no embed_tokens of its own"),
        ({"draft_vocab_size": 98}, "draft_vocab_size is 98, but the model has 97 ids"),
        ({"draft_vocab_size": 41}, r"tensor 'lm_head.weight' has shape \[40, 60\], expected \[41, 60\]"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_what_would_be_computed_otherwise_is_refused_by_name(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_eagle3(tmp_path, 97, 40)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        eagle3(target, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": None}, "tensor 'd2t' is missing"),
        ({"d2t": torch.zeros(39, dtype=torch.int64)}, r"tensor 'd2t' has shape \[39\] of torch.int64, expected 40"),
        ({"d2t": torch.zeros(40)}, r"of torch.float32, expected 40 whole numbers"),
        ({"d2t": torch.full((40,), 60)}, "'d2t' leads from the head's id 37 to 97, must be to one from 0 to 96"),
        ({"d2t": torch.full((40,), -1)}, "'d2t' leads from the head's id 0 to -1, must be to one from 0 to 96"),
        ({"fc.weight": None}, "tensor 'fc.weight' is missing"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, "is not part of the model that the config describes"),
    ],
    ids=["no map", "short", "floats", "too large", "negative", "no fc", "another layer"],
)
def test_damaged_heads_are_refused_by_name(
    target: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    save_eagle3(tmp_path, 97, 40)
    file = tmp_path / "model.safetensors"
    tensors = {name: each for name, each in (load_file(file) | changes).items() if each is not None}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        eagle3(target, tmp_path)


def test_other_settings_that_cannot_be_had_are_refused_by_name(target: Path, tmp_path: Path) -> None:
    save_eagle3(tmp_path, 97, 40)
    with pytest.raises(ConfigError, match="quantization 'fp3' is not known for a head"):
        eagle3(target, tmp_path, quantization="fp3")
    with pytest.raises(ConfigError, match="ranks 7 is more than the model's 6 query heads"):
        eagle3(target, tmp_path, size=7)
    config = ModelConfig(str(target), "tiny")
    prepared = prepare(config, CacheConfig(), 0, 1)
    with pytest.raises(
        ConfigError, match=r"method is mtp, but .* has no layer for multi-token prediction behind its 6"
    ):
        prepare_mtp(config, prepared)


@pytest.mark.parametrize("is_copy", [True, False])
def test_an_embedding_that_is_the_targets_is_not_held_twice(target: Path, tmp_path: Path, is_copy: bool) -> None:
    save_eagle3(tmp_path, 97, 40)
    without, file = eagle3(target, tmp_path).weight_bytes, tmp_path / "model.safetensors"
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    save_file(load_file(file) | {"embed_tokens.weight": embedding + (not is_copy)}, file)
    head = eagle3(target, tmp_path)
    assert head.spec.has_embedding is not is_copy
    assert (head.weight_bytes > without) is not is_copy
