"""What the serving benchmark sends: made-up prompts, files, and moments."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from allspan.client.bench.serving.workload import BLOCK_TOKENS, FIRST_ID, LAST_ID, WorkloadConfig, as_text, workload
from allspan.protos.api.errors import ConfigError


def test_random_prompts_have_the_length_asked_for_and_known_ids() -> None:
    items = workload(WorkloadConfig(num_prompts=5, random_input_len=40, random_output_len=7, random_prefix_len=3))
    assert [len(item.prompt) for item in items] == [43] * 5
    assert {item.output_len for item in items} == {7}
    assert {item.at for item in items} == {0.0}, "without a rate all leave at once"
    assert len({tuple(item.prompt[:3]) for item in items}) == 1
    assert len({tuple(item.prompt) for item in items}) == 5
    assert all(isinstance(token, int) and FIRST_ID <= token <= LAST_ID for item in items for token in item.prompt)
    assert workload(WorkloadConfig(num_prompts=5, seed=1)) == workload(WorkloadConfig(num_prompts=5, seed=1))


def test_a_range_ratio_spreads_the_lengths() -> None:
    items = workload(WorkloadConfig(num_prompts=300, random_input_len=100, random_range_ratio=0.5))
    lengths = [len(item.prompt) for item in items]
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_moments_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    items = workload(WorkloadConfig(num_prompts=4000, random_input_len=1, request_rate=20, burstiness=burstiness))
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(items)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.15)
    assert statistics.pstdev(gaps) / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.15)


def test_groups_share_their_beginning() -> None:
    config = WorkloadConfig(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=20,
        prefix_repetition_suffix_len=5,
    )
    prompts = [item.prompt for item in workload(config)]
    assert {len(prompt) for prompt in prompts} == {25}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 3
    assert len({tuple(prompt) for prompt in prompts}) == 12


def write(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_mooncake_trace_keeps_moments_lengths_and_shared_blocks(tmp_path: Path) -> None:
    first = {"timestamp": 5000, "input_length": 1100, "output_length": 9, "hash_ids": [7, 8, 9]}
    second = {"timestamp": 6500, "input_length": 600, "output_length": 3, "hash_ids": [7, 10]}
    path = write(tmp_path / "t.jsonl", first, second)
    items = workload(WorkloadConfig(dataset_name="trace", dataset_path=path, trace_speedup=3))
    assert [(item.at, len(item.prompt), item.output_len) for item in items] == [(0.0, 1100, 9), (0.5, 600, 3)]
    one, two = (item.prompt for item in items)
    assert one[:BLOCK_TOKENS] == two[:BLOCK_TOKENS]
    assert one[BLOCK_TOKENS : BLOCK_TOKENS + 80] != two[BLOCK_TOKENS:592]


def test_a_burstgpt_trace_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "b.jsonl", {"Timestamp": 3, "Request tokens": 5, "Response tokens": 2, "Model": "x"})
    (item,) = workload(WorkloadConfig(dataset_name="trace", dataset_path=path))
    assert (item.at, len(item.prompt), item.output_len) == (0.0, 5, 2)


def test_traces_of_azure_and_burstgpt_are_read_as_csv(tmp_path: Path) -> None:
    azure, burst = tmp_path / "azure.csv", tmp_path / "burst.csv"
    azure.write_text(
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59.5000000,374,44\r\n"
        "2023-11-17 00:00:01.5000000,39,0\r\n2023-11-17 00:00:09,5,5\r\n",
        encoding="utf-8",
    )
    burst.write_text('Timestamp,Model,Request tokens,Response tokens\n3.5,"a, b",374,44\n\n5.5,x,39.0,1\n')
    for path in (azure, burst):
        settings = {"dataset_name": "trace", "dataset_path": str(path), "num_prompts": 2}
        items = workload(WorkloadConfig(**settings))
        assert [(item.at, len(item.prompt), item.output_len) for item in items] == [(0.0, 374, 44), (2.0, 39, 1)]
        assert {item.at for item in workload(WorkloadConfig(**settings, trace_speedup=math.inf))} == {0.0}


def test_conversations_bring_their_first_turn_and_the_length_of_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    turns = [{"from": "human", "value": "Hello there"}, {"from": "gpt", "value": "x" * 80}, {"value": "more"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"id": 1}]))
    (item,) = workload(WorkloadConfig(dataset_name="sharegpt", dataset_path=str(path)))
    assert (item.prompt, item.output_len) == ("Hello there", 20)
    (item,) = workload(WorkloadConfig(dataset_name="sharegpt", dataset_path=str(path), sharegpt_output_len=5))
    assert item.output_len == 5


def test_a_prompt_of_ids_becomes_as_many_words() -> None:
    assert as_text("as it is") == "as it is"
    assert len(as_text(list(range(300, 310))).split()) == 10
    assert as_text([300, 301]) == as_text([300, 301])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_name": "nosuch"}, "--dataset-name is 'nosuch', must be one of random"),
        ({"dataset_name": "trace"}, "--dataset-path is needed"),
        ({"dataset_path": "x"}, "--dataset-path is needed with, and only with"),
        ({"request_rate": 0.0}, "--request-rate is 0.0, must be more than 0"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio is 1.0"),
        ({"num_prompts": 0}, "--num-prompts is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkloadConfig(**settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"timestamp": 1}', "line 1: KeyError"),
        ("[]", "line 1: (Attribute|Type|Key)Error"),
        ("{", "line 1: JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5", "line 2: KeyError.'GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n\n2023-11-99 18:15:46,5,5", "line 3: ValueError.'day is out"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,inf,5", "line 2: OverflowError"),
        ("Timestamp,Request tokens,Response tokens\n1,5,5\ninf,5,5", "line 3: .*Timestamp is inf, must be finite"),
        ("when,tokens\n1,2", "line 2: KeyError.'timestamp or Timestamp or TIMESTAMP'"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        workload(WorkloadConfig(dataset_name="trace", dataset_path=str(path)))
    with pytest.raises(ConfigError, match="No such file"):
        workload(WorkloadConfig(dataset_name="sharegpt", dataset_path=str(tmp_path / "nosuch")))
