from __future__ import annotations

import json
from typing import Any

import pytest

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.config_json import from_json, settled, to_json
from allspan.protos.config.settings import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServiceConfig,
    WorkerConfig,
)

FULL = WorkerConfig(
    ModelConfig("/models/tiny", "tiny", "bfloat16", 512, load_format="dummy"),
    ServiceConfig("/run/1", 3, "", 42),
    CacheConfig(16, "float32", 2**30),
    SchedulerConfig(8, 64, 16),
    ParallelConfig(2, (0, 5), "mpi", timeout_s=7.5, oversubscribed=True),
    AdapterConfig(("sql=/a", "b=/c"), 64),
)
LEAST: dict[str, Any] = {"model": {"path": "/m", "name": "m"}, "service": {"run_dir": "/r"}}


def test_every_field_survives_the_file() -> None:
    assert from_json(to_json(FULL)) == FULL


def test_what_is_left_out_has_its_default() -> None:
    assert from_json(json.dumps(LEAST)) == settled(WorkerConfig(ModelConfig("/m", "m"), ServiceConfig("/r")))


def test_each_rank_reads_its_own_entry() -> None:
    text = to_json(FULL, [{"threads": 1, "cpus": [3]}, {"threads": 3, "cpus": [4, 5, 6]}])
    first, second = from_json(text, 0).parallel, from_json(text, 1).parallel
    assert (first.threads, first.cpus) == (1, (3,))
    assert (second.threads, second.cpus, second.timeout_s) == (3, (4, 5, 6), 7.5)
    assert from_json(to_json(FULL, [{"collectives": "window"}])).parallel.cpus == (0, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modle": {}}, "unknown key 'modle'"),
        ({"model": {"path": "/m", "name": "m", "dtpye": "x"}}, "unknown key 'model.dtpye'"),
        ({"model": {"path": "/m"}}, "model.name is missing"),
        ({"model": {"path": "", "name": "m"}}, "model.path is empty"),
        ({"model": {"path": "/m", "name": 5}}, "model.name is 5, must be of type str"),
        ({"model": {"path": "/m", "name": "m", "dtype": "float17"}}, 'model.dtype is "float17", must be one of auto'),
        ({"cache": {"page_size": 17}}, "cache.page_size is 17, must be one of 16, 32, 64, 128"),
        ({"cache": []}, "cache must be an object"),
        ({"scheduler": {"max_num_seqs": -1}}, "scheduler.max_num_seqs is -1, must be from 0 to 4096"),
        (
            {"scheduler": {"max_num_batched_tokens": 10**12}},
            "max_num_batched_tokens is 1000000000000, must be from 0 to",
        ),
        ({"parallel": {"threads": 0}}, "parallel.threads is 0, must be from 1 to 4096"),
        ({"parallel": {"threads": True}}, "parallel.threads is true, must be of type int"),
        ({"parallel": {"timeout_s": float("nan")}}, "parallel.timeout_s is NaN"),
        ({"parallel": {"threads": 2, "cpus": [1]}}, "parallel.cpus has 1 processors, must have 2"),
        ({"parallel": {"cpus": [-1]}}, "parallel.cpus is [-1], must be a list of integers"),
        ({"ranks": [{"thread": 1}]}, "unknown key 'ranks[0].thread'"),
        ({"ranks": [5]}, "ranks[0] must be an object"),
        ({"ranks": {}}, "ranks must be a list"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(json.dumps(LEAST | changes))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["", "[]", "{", "7"])
def test_a_file_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the worker's configuration"):
        from_json(text)


def test_a_rank_without_an_entry_is_refused() -> None:
    with pytest.raises(ConfigError, match="this is rank 2"):
        from_json(to_json(FULL, [{"threads": 1}, {"threads": 1}]), 2)
