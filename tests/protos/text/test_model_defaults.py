"""Defaults that a model's publisher recommends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allspan.protos.api.errors import CheckpointError
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text import GenerationDefaults, generation_defaults
from support.gguf_files import byte_level_gguf


def read(folder: Path, **values: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return generation_defaults(folder)


def test_values_are_taken_over(tmp_path: Path) -> None:
    defaults = read(
        tmp_path,
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        typical_p=0.7,
        repetition_penalty=1.1,
        max_new_tokens=99,
        eos_token_id=[5, 7, 5],
    )
    assert defaults == GenerationDefaults(0.6, 40, 0.9, 0.1, 99, (5, 7), typical_p=0.7, repetition_penalty=1.1)
    params = SamplingParams(**defaults.sampling())
    assert (params.top_k, params.typical_p, params.repetition_penalty) == (40, 0.7, 1.1)


def test_what_is_not_said_stays_open(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == GenerationDefaults()
    defaults = read(tmp_path, temperature=None, eos_token_id=2)
    assert defaults == GenerationDefaults(eos_token_ids=(2,))
    assert defaults.sampling() == {}


def test_no_sampling_is_temperature_zero_until_a_caller_gives_one(tmp_path: Path) -> None:
    values = read(tmp_path, do_sample=False, temperature=0.7).sampling()
    assert SamplingParams(**values).is_greedy
    assert not SamplingParams(**(values | {"temperature": 0.5})).is_greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 2),
        ("min_p", True),
        ("typical_p", 0),
        ("repetition_penalty", 2.5),
        ("do_sample", "no"),
    ],
)
def test_a_bad_value_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {field} is "):
        read(tmp_path, **{field: value})


def test_a_bad_number_of_tokens_is_refused_by_its_name_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: max_new_tokens is 0"):
        read(tmp_path, max_new_tokens=0)


@pytest.mark.parametrize("value", ["</s>", -1, [1, True], [None], 1.0])
def test_bad_end_ids_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id is "):
        read(tmp_path, eos_token_id=value)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        generation_defaults(tmp_path)


def test_a_gguf_file_says_how_answers_end(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "m.gguf", eos_token_id=7)
    assert generation_defaults(path) == GenerationDefaults(eos_token_ids=(7,))
