"""speculative_config: vLLM's keys, checked by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.config_json import check
from allspan.protos.config.settings import ModelConfig, ParallelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.protos.config.speculation import MODEL_TOKENS, Speculation, parse_speculation, with_draft_model


def test_no_text_asks_for_none_and_an_empty_object_for_the_defaults() -> None:
    assert parse_speculation("") is None
    asked = parse_speculation("{}")
    assert asked is not None
    assert (asked.method, asked.num_speculative_tokens) == ("suffix", 31)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [("", (5, 5)), (', "prompt_lookup_max": 3', (3, 3)), (', "prompt_lookup_min": 2, "prompt_lookup_max": 4', (2, 4))],
)
def test_one_end_of_the_lookup_takes_the_others_value(ends: str, expected: tuple[int, int]) -> None:
    asked = parse_speculation('{"method": "ngram", "num_speculative_tokens": 4' + ends + "}")
    assert asked is not None
    assert (asked.num_speculative_tokens, asked.prompt_lookup_min, asked.prompt_lookup_max) == (4, *expected)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1]", "must be a JSON object; write it as"),
        ('{"method": "medusa"}', "method is 'medusa', must be one of suffix, ngram, draft_model, eagle3, mtp"),
        ('{"drafter": "x"}', "has the key 'drafter', known are method, num_speculative_tokens"),
        ('{"method": "draft_model"}', "model is missing, which method 'draft_model' drafts with; write it as"),
        ('{"method": "eagle3"}', "model is missing, which method 'eagle3' drafts with; write it as"),
        ('{"method": "mtp", "model": "x"}', "model is given, but method 'mtp' drafts with layers of the model itself"),
        ('{"method": "ngram", "model": "x"}', "model is given, but method 'ngram' drafts without a model"),
        ('{"quantization": "a8w8"}', "quantization is given, but method 'suffix' drafts without a model"),
        ('{"replay_rate": 0.5}', "has the key 'replay_rate', known are method, (?!.*replay)"),
        ('{"method": "replay", "replay_rate": 0}', "replay_rate is 0, must be from 0.01 to 1"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0, must be from 1 to 63"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens is 'True', must be of type int"),
        ('{"prompt_lookup_min": 4, "prompt_lookup_max": 3}', "prompt_lookup_min is 4, must be at most"),
        ('{"suffix_decoding_min_token_prob": 2}', "is 2, must be from 0 to 1"),
        ('{"suffix_decoding_max_spec_factor": ' + "9" * 400 + "}", "is an integer of 1329 bits, must be from"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_speculation(text)


@pytest.mark.parametrize("method", ["", '"method": "draft_model", '])
def test_a_model_is_asked_for_by_its_name_alone(method: str) -> None:
    asked = parse_speculation("{" + method + '"model": "small", "quantization": "a8w8"}')
    assert asked is not None
    assert (asked.method, asked.model, asked.quantization) == ("draft_model", "small", "a8w8")
    assert asked.num_speculative_tokens < 31


def test_the_model_that_drafts_is_found_once() -> None:
    asks = '{"model": "small", "num_speculative_tokens": 3}'
    found = with_draft_model(asks, lambda name: f"/models/{name}")
    assert parse_speculation(found) == Speculation("draft_model", 3, 5, 5, model="/models/small")
    head = with_draft_model('{"method": "eagle3", "model": "head"}', lambda name: f"/models/{name}")
    assert parse_speculation(head) == Speculation("eagle3", MODEL_TOKENS, 5, 5, model="/models/head")
    for other in ("", "{}", '{"method": "ngram"}', '{"method": "mtp"}'):
        assert with_draft_model(other, lambda name: name + "!") == other


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp"])
def test_a_layer_for_multi_token_prediction_is_asked_for_by_either_name(method: str) -> None:
    assert parse_speculation(f'{{"method": "{method}"}}') == Speculation("mtp", MODEL_TOKENS, 5, 5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("asks", ["{}", '{"model": "small"}', '{"method": "mtp"}'])
def test_pipelines_are_refused(device: str, asks: str) -> None:
    config = WorkerConfig(
        ModelConfig("x", "x", device=device), ServiceConfig("-"), scheduler=SchedulerConfig(speculative_config=asks)
    )
    assert check(config) is config
    with pytest.raises(ConfigError, match="not drafted in pipelines"):
        check(replace(config, parallel=ParallelConfig(pipeline_parallel_size=2)))
