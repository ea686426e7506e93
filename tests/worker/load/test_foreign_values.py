"""Configs in other shapes: nested, renamed, with values overridden, and with what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.hf_overrides import overridden, parse_overrides
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load.loader import prepare
from allspan.worker.load.registry import FAMILIES, find_model
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.spec import ModelSpec
from support.family_rows import FAMILIES as ROWS
from support.family_rows import save_family
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
IDS = prompt(60, 97)


def spec_of(folder: Path, values: dict[str, Any], **overrides: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(values))
    return find_model(str(folder), overrides).spec


def renamed_tensors(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace(old, new, 1): each for name, each in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("new", ["", "language_model.model.", "model.language_model."])
def test_the_embedding_tells_how_tensors_are_named(new: str, tmp_path: Path) -> None:
    expected = reference_logits(save_family(tmp_path, ROWS["qwen3"]), IDS)
    renamed_tensors(tmp_path, "model.", new)
    assert relative_error(logits_on_ranks(tmp_path, 2, [IDS])[0], expected) < 1e-4


def test_a_model_saved_without_its_head_has_the_embedding_for_one(tmp_path: Path) -> None:
    row = ROWS["qwen3"]
    model = save_family(tmp_path, row)
    model.model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    model.lm_head.weight = model.model.embed_tokens.weight
    assert relative_error(logits_on_ranks(tmp_path, 2, [IDS])[0], reference_logits(model, IDS)) < 1e-4


def test_a_head_beside_tied_embeddings_is_left(tmp_path: Path) -> None:
    expected = reference_logits(save_family(tmp_path, ROWS["smollm3"]), IDS)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, tmp_path / "model.safetensors")
    assert relative_error(logits_on_ranks(tmp_path, 1, [IDS])[0], expected) < 1e-4


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family inside models of images, with old names and tensors of its own to skip."""
    llama = FAMILIES["llama"]
    family = Family(
        "toy",
        ("ToyForCausalLM",),
        llama.read,
        inside=("toy_vision",),
        skipped=("vision_tower.",),
        renamed={"n_embd": "hidden_size", "num_layers": "num_hidden_layers"},
        defaults={"rope_theta": 77.0},
    )
    monkeypatch.setitem(FAMILIES, "toy", family)


@pytest.mark.usefixtures("speaking")
def test_a_nested_config_is_read_with_what_stands_beside_it(tmp_path: Path) -> None:
    text = {key: value for key, value in LLAMA.items() if key not in ("model_type", "rope_theta")}
    outer = {"model_type": "toy_vision", "eos_token_id": [7, 8], "tie_word_embeddings": True, "dtype": "bfloat16"}
    spec = spec_of(tmp_path, outer | {"text_config": {"model_type": "toy"} | text})
    assert (spec.eos_token_ids, spec.tie_word_embeddings, spec.dtype) == ((7, 8), True, "bfloat16")
    assert spec.layers[0].attention.rotary.theta == 77.0  # type: ignore[union-attr]
    old = {"n_embd": 64, "num_layers": 2} | {
        k: v for k, v in text.items() if k not in ("hidden_size", "num_hidden_layers")
    }
    assert len(spec_of(tmp_path, outer | {"text_config": {"model_type": "toy"} | old}).layers) == 2
    for wrong, message in (
        (text, r"text_config: model_type None is not supported"),
        ({"model_type": "llama"} | text, r"text_config of model type 'llama' in one of 'toy_vision'"),
        ([], r"text_config must be an object, got \[\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            spec_of(tmp_path, outer | {"text_config": wrong})


@pytest.mark.usefixtures("speaking")
def test_tensors_of_images_are_skipped_by_the_families_own_list(tmp_path: Path) -> None:
    save_family(tmp_path, ROWS["llama"])
    config = json.loads((tmp_path / "config.json").read_text())
    expected = logits_on_ranks(tmp_path, 1, [IDS])[0]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["vision_tower.patch.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'vision_tower.patch.weight' is not part of the model"):
        logits_on_ranks(tmp_path, 1, [IDS])
    config |= {"model_type": "toy", "architectures": ["ToyForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert relative_error(logits_on_ranks(tmp_path, 1, [IDS])[0], expected) < 1e-6


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_nested_config_takes_rope_overrides_however_they_are_spelled(key: str) -> None:
    values = {"text_config": {"rope_scaling": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4}}}
    found = overridden(values, {"text_config": {key: YARN}})["text_config"]
    assert found == {"rope_parameters": {"rope_theta": 5e4} | YARN}


def test_rope_by_kind_of_layer_is_overridden_by_kind() -> None:
    values = {"rope_parameters": {kind: {"rope_theta": 7.0} for kind in ("full_attention", "sliding_attention")}}
    found = overridden(values, {"rope_parameters": {"full_attention": YARN}})
    assert found["rope_parameters"]["full_attention"] == {"rope_theta": 7.0} | YARN
    with pytest.raises(ConfigError, match=r"by kind of layer \(full_attention, sliding_attention\): name one"):
        overridden(values, {"rope_parameters": YARN})


def test_overrides_are_merged_into_the_config(tmp_path: Path) -> None:
    by_hand = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    by_hand["rope_parameters"] = YARN | {"rope_theta": 500000.0}
    wanted = spec_of(tmp_path, by_hand)
    assert wanted.max_position_embeddings == 32768
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for found in (
        {},
        {"rope_scaling": None},
        {"rope_scaling": llama3},
        {"rope_parameters": llama3 | {"rope_theta": 5e5}},
    ):
        for name in ("rope_parameters", "rope_scaling"):
            assert spec_of(tmp_path, LLAMA | found, **{name: YARN}) == wanted
    assert spec_of(tmp_path, LLAMA | {"rope_scaling": YARN}, rope_parameters=None) == spec_of(tmp_path, LLAMA)
    assert overridden({"text_config": {"a": 1}, "b": 2}, {"a": 3, "b": 4}) == {"text_config": {"a": 3}, "b": 4}
    config = ModelConfig(str(tmp_path), "x", load_format="dummy", hf_overrides=json.dumps({"rope_parameters": YARN}))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert prepare(config, CacheConfig(), 1, 2).max_model_len == 32768


@pytest.mark.parametrize("text", ["[]", "7", "{", '{"a": 1, "a": 2}', "rope=yarn", '{"a": NaN}'])
def test_overrides_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="hf_overrides: is_matryoshka says how the model embeds"):
        parse_overrides('{"is_matryoshka": true}')
    with pytest.raises(ConfigError, match=r"hf_overrides .*KEY"):
        parse_overrides(text)


def longrope(long: Any, short: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": "su", "long_factor": long, "short_factor": short}}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "phi3, long",
            longrope([1.0] * 5, [1.0] * 8),
            "5 long rope frequency factors .* must be 8",
        ),
        ("phi3, long", longrope([1.0] * 8, 1.0), "short_factor must be a list of positive numbers"),
        ("phi3, long", longrope([0.0] * 8, [1.0] * 8), "long_factor must be a list of positive numbers"),
        ("phi3, window", {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ("phi3, window", {"sliding_window": -4}, "sliding_window must be a positive integer, got -4"),
        ("glm", {"partial_rotary_factor": 0}, "partial_rotary_factor must be a positive number, got 0"),
        ("glm", {"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0, must be at most 1"),
        ("glm", {"partial_rotary_factor": 0.05}, "turns no pair"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 0]}, "no_rope_layers must have 0 or 1 for each of 4 layers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must have 0 or 1 for each of 4 layers"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier must be a positive number, got 0"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, "layer_types 'mamba' is not supported"),
        ("granitemoehybrid", {"num_local_experts": 4}, "num_local_experts 4 is not supported"),
        ("llama, dynamic", {"rope_scaling": {"type": "dynamic"}}, "factor must be a positive number, got None"),
    ],
)
def test_configs_that_cannot_be_are_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    row = ROWS[name]
    base = LLAMA | {"num_hidden_layers": 4, "head_dim": 16, "model_type": row.model_type}
    config = {key: value for key, value in row.config.items() if not key.startswith("rope")}
    with pytest.raises(CheckpointError, match=message):
        spec_of(tmp_path, base | config | changes)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"is_causal": False}, "attention in both directions"),
        ({"use_bidirectional_attention": True}, "attention in both directions"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer"),
        ({"sliding_window": -4}, "sliding_window must be a positive integer"),
        ({"layer_types": ["full_attention", "mamba"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "granite"])
def test_what_a_config_may_not_say_of_attention(family: str, lie: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": family, "num_key_value_heads": 4} | lie))
    with pytest.raises(CheckpointError, match=said):
        find_model(str(tmp_path))
