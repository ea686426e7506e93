"""The sampling defaults that apply to a model, and the flags that change them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.config.generation import GenerationConfig
from allspan.protos.text import default_params, sampling_defaults
from allspan.protos.text.known_defaults import KNOWN, OTHERS, known_defaults
from allspan.protos.text.model_defaults import sampling_of
from support.gguf_files import byte_level_gguf

CHAT = {"tokenizer.chat_template": "{{ messages[0].content }}"}
SMOLLM2 = {"general.architecture": "llama", "general.basename": "smollm2", "general.size_label": "135M", **CHAT}
PENALISED = {"temperature": 0.2, "top_p": 0.9, "frequency_penalty": 0.2}


def folder(path: Path, config: dict[str, Any] | None = None, **generation: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    (path / "chat_template.jinja").write_text(CHAT["tokenizer.chat_template"])
    if generation:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_a_generation_config_counts_as_it_is_and_what_it_leaves_out_is_neutral(tmp_path: Path) -> None:
    defaults = sampling_defaults(folder(tmp_path / "SmolLM2", top_p=0.5))
    assert defaults.sampling() == {"top_p": 0.5}
    assert (defaults.described()["temperature"], defaults.described()["top_k"]) == (1.0, 0)
    assert "generation_config.json" in defaults.source


def test_a_generation_config_that_says_nothing_of_sampling_leaves_it_to_the_family(tmp_path: Path) -> None:
    defaults = sampling_defaults(folder(tmp_path / "SmolLM2-360M", eos_token_id=2, max_new_tokens=50))
    assert defaults.sampling() == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 50}
    assert "SmolLM2" in defaults.source


def test_do_sample_false_is_temperature_zero(tmp_path: Path) -> None:
    assert sampling_defaults(folder(tmp_path, do_sample=False)).sampling() == {"temperature": 0.0}


def test_gguf_metadata_counts_before_the_family(tmp_path: Path) -> None:
    keys = {"temp": 0.5, "top_k": 7, "penalty_repeat": 1.2}
    path = byte_level_gguf(tmp_path / "m.gguf", **SMOLLM2, **{f"general.sampling.{k}": v for k, v in keys.items()})
    assert sampling_defaults(path).sampling() == {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.2}


def test_a_bad_value_in_gguf_metadata_is_refused_by_its_key(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "m.gguf", **{"general.sampling.temp": -1.0})
    with pytest.raises(CheckpointError, match=r"general\.sampling\.temp is -1"):
        sampling_defaults(path)


def test_a_gguf_file_is_known_by_its_metadata_or_by_its_name(tmp_path: Path) -> None:
    for path in (
        byte_level_gguf(tmp_path / "m.gguf", **SMOLLM2),
        byte_level_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf", **CHAT),
    ):
        assert sampling_defaults(path).sampling() == PENALISED


def test_a_greedy_request_takes_no_default_penalties(tmp_path: Path) -> None:
    defaults = sampling_defaults(folder(tmp_path, temperature=0.3, repetition_penalty=1.1))
    assert defaults.under({"top_k": 3}) == {"temperature": 0.3, "repetition_penalty": 1.1, "top_k": 3}
    assert defaults.under({"temperature": 0}) == {"temperature": 0}
    assert "repetition_penalty" not in defaults.under({"do_sample": False})
    assert defaults.under({"temperature": 0, "repetition_penalty": 1.2})["repetition_penalty"] == 1.2


def test_penalties_of_the_operator_apply_to_greedy_requests_too(tmp_path: Path) -> None:
    config = GenerationConfig(override_generation_config='{"presence_penalty": 0.5}')
    defaults = sampling_defaults(byte_level_gguf(tmp_path / "m.gguf", **SMOLLM2), config=config)
    assert defaults.under({}) == PENALISED | {"presence_penalty": 0.5}
    assert defaults.under({"temperature": 0}) == {"temperature": 0, "top_p": 0.9, "presence_penalty": 0.5}


@pytest.mark.parametrize("override", ['{"temperature": 0}', '{"do_sample": false}'])
def test_under_an_operators_greedy_only_sampled_requests_get_the_models_penalties(
    tmp_path: Path, override: str
) -> None:
    config = GenerationConfig(override_generation_config=override)
    defaults = sampling_defaults(byte_level_gguf(tmp_path / "m.gguf", **SMOLLM2), config=config)
    assert defaults.sampling() == {"temperature": 0, "top_p": 0.9}
    assert defaults.described()["frequency_penalty"] == 0
    assert "frequency_penalty" not in defaults.sentence()
    assert defaults.under({"temperature": 0.7}) == PENALISED | {"temperature": 0.7}


def test_a_base_model_does_not_take_the_values_of_chat_models(tmp_path: Path) -> None:
    bare = folder(tmp_path / "Meta-Llama-3-8B")
    (bare / "chat_template.jinja").unlink()
    for path, why in (
        (bare, "no chat template"),
        (byte_level_gguf(tmp_path / "SmolLM2-135M.gguf"), "no chat template"),
        (folder(tmp_path / "Qwen3-0.6B-Base", {"model_type": "qwen3"}), "that of a base model"),
        (byte_level_gguf(tmp_path / "b.gguf", **{"general.name": "Qwen3 8B Base", **CHAT}), "that of a base model"),
    ):
        defaults = sampling_defaults(path)
        assert defaults.sampling() == OTHERS.values
        assert why in defaults.source
    (bare / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    assert sampling_defaults(bare).sampling() == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    ("name", "architecture", "temperature", "top_k"),
    [
        ("Qwen2.5 7B Instruct", "qwen2", 0.7, 20),
        ("fine-tuned", "qwen2", 0.7, 20),
        ("Qwen3-8B", "qwen3", 0.6, 20),
        ("Qwen3-4B-Instruct-2507", "qwen3", 0.7, 20),
        ("DeepSeek-R1-Distill-Qwen-1.5B", "qwen2", 0.6, None),
        ("Meta_Llama_3.1_8B_Instruct", "llama", 0.6, None),
        ("Mistral-7B-Instruct-v0.3", "llama", 0.7, None),
        ("Mistral-Nemo-Instruct-2407", "llama", 0.3, None),
        ("SmolLM3-3B", "llama", 0.6, None),
        ("of nobody's", "llama", 0.8, 40),
    ],
)
def test_families_are_known_by_name_then_by_architecture(
    name: str, architecture: str, temperature: float, top_k: int | None
) -> None:
    values = known_defaults([name], architecture).values
    assert (values["temperature"], values.get("top_k")) == (temperature, top_k)


def test_every_row_holds_values_that_a_request_may_have_and_says_where_from() -> None:
    for row in (*KNOWN, OTHERS):
        assert sampling_of(row.values) == row.values
        assert row.source


@pytest.mark.parametrize("word", ["neutral", "vllm"])
def test_neutral_switches_everything_off(tmp_path: Path, word: str) -> None:
    defaults = sampling_defaults(folder(tmp_path, temperature=0.3), config=GenerationConfig(word))
    assert defaults.sampling() == {}
    assert "temperature 1, no filters" in defaults.sentence()


def test_another_folders_generation_config_can_be_taken(tmp_path: Path) -> None:
    model, other = folder(tmp_path / "m", temperature=0.3), folder(tmp_path / "o", top_k=5)
    assert sampling_defaults(model, config=GenerationConfig(str(other))).sampling() == {"top_k": 5}
    with pytest.raises(
        ConfigError, match=r"--generation-config is '/none', must be auto, neutral or vllm, or a folder"
    ):
        sampling_defaults(model, config=GenerationConfig("/none"))


def test_the_override_wins_over_the_model_field_by_field(tmp_path: Path) -> None:
    config = GenerationConfig(override_generation_config='{"temperature": 0, "max_new_tokens": 7}')
    defaults = sampling_defaults(folder(tmp_path, temperature=0.3, top_p=0.5), config=config)
    assert defaults.sampling() == {"temperature": 0, "top_p": 0.5, "max_tokens": 7}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"temprature": 1}', "has 'temprature'; did you mean temperature"),
        ('{"top_p": 0}', "top_p is 0"),
    ],
)
def test_a_bad_override_is_refused_by_name(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"--override-generation-config.*{words}"):
        sampling_defaults(folder(tmp_path), config=GenerationConfig(override_generation_config=override))


def test_a_python_request_without_parameters_takes_the_models(tmp_path: Path) -> None:
    params = default_params(folder(tmp_path / "x"), "SmolLM2-135M-Instruct")
    assert (params.temperature, params.top_p, params.max_tokens) == (0.2, 0.9, 128)
