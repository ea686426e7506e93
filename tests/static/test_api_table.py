"""docs/api.md maps every call of DashInfer: nothing is left out, and what it names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from allspan import ClientEngine, Engine, RequestOptions, SamplingParams
from allspan.protos.api import errors
from allspan.protos.api.engine import EngineProtocol, EngineStatistics
from allspan.protos.api.results import Output, RequestState, RequestTimings, ResultQueue

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
HOLDERS: dict[str, Any] = {
    "ClientEngine": ClientEngine,
    "Engine": Engine,
    "SamplingParams": SamplingParams,
    "RequestOptions": RequestOptions,
}
TYPES: dict[str, Any] = {
    kind.__name__: kind for kind in (EngineStatistics, Output, RequestState, RequestTimings, ResultQueue)
}

RPCS = """
    BuildModelFromConfigStruct StartModel StopModel ReleaseModel StartRequest StopRequest ReleaseRequest SyncRequest
    ShutdownService GetRankNums GenerateStatus GeneratedLength Get GetNoWait GetModelInformation GetOpProfilingInfo
    GetAsEngineStat GetFileInformation GetVersionFull GetRankId ReloadModelToDeviceMemory UnloadModelFromDeviceMemory
"""
METHODS = """
    install_model build_model_from_config_struct start_model stop_model release_model start_request start_request_ids
    start_request_text sync_request stop_request release_request get_no_wait get_wait get_request_status load_lora
    unload_lora unload_device_mem load_device_mem get_model_info get_file_information get_as_engine_stat
    get_op_profiling_info get_rank_id get_version_full is_allspark_work_as_service serialize_model_from_torch
    dump_build_meta_to_proto
"""
STATES = "Init ContextFinished Generating GenerateFinished GenerateInterrupted InternalError"
REQUEST_STATISTICS = """
    arrival_time first_token_time last_token_time time_to_first_token time_in_queue finished_time context_token_length
    generated_token_length context_cached_length context_tps generate_tps
"""
ENGINE_STATISTICS = """
    model_name total_span used_span free_span free_token span_size pendding_request running_request
    total_device_memory_pool_size used_device_memory_pool_size total_generated_token total_prefill_token
    generate_token_persec process_token_persec prefix_cache_hit_token prefix_cache_miss_token prefix_cache_hit_rate
    prefix_cache_miss_rate
"""
GENERATION = """
    do_sample early_stopping num_beams num_return_sequences max_length min_length eos_token_id stop_words_ids
    bad_words_ids temperature top_k top_p repetition_penalty presence_penalty frequency_penalty
    suppress_repetition_in_generation no_repeat_ngram_size length_penalty seed logprobs top_logprobs lora_name
    response_format vocab vocab_type mm_info enable_tensors_from_model_inference uuid user_request_id
"""


def tables() -> Iterator[list[list[str]]]:
    """Rows of cells; the first row is the header."""
    for block in re.findall(r"(?:^\|.*\|\n)+", TEXT, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        yield [rows[0], *rows[2:]]


def table(head: str) -> list[list[str]]:
    (found,) = [rows for rows in tables() if head in (rows[0][0], rows[0][1])]
    return found


def counterparts() -> list[tuple[str, str]]:
    """(column, name) of everything that a counterpart column names."""
    found = []
    for rows in tables():
        for i, column in enumerate(rows[0]):
            if column in HOLDERS:
                found += [(column, name) for row in rows[1:] for name in re.findall(r"`([^`]+)`", row[i])]
    return found


@pytest.mark.parametrize("column", sorted(HOLDERS))
def test_every_counterpart_exists(column: str) -> None:
    names = [name for where, name in counterparts() if where == column]
    assert names
    for name in names:
        owner, _, attribute = name.rpartition(".")
        if owner:
            kind = TYPES[owner]
            annotated = getattr(kind, "__dataclass_fields__", {})
            assert hasattr(kind, attribute) or attribute in annotated, name
        elif name[0].isupper():
            assert issubclass(getattr(errors, name), errors.AllspanError), name
        else:
            assert hasattr(HOLDERS[column], name), f"{column}.{name}"


def test_both_engines_have_the_same_counterparts() -> None:
    of = {column: [name for where, name in counterparts() if where == column] for column in ("ClientEngine", "Engine")}
    assert of["ClientEngine"] == of["Engine"]


@pytest.mark.parametrize(
    ("head", "names", "count"),
    [
        ("DashInfer RPC", RPCS, 22),
        ("DashInfer method", METHODS, 27),
        ("DashInfer state", STATES, 6),
        ("DashInfer RequestStatInfo", REQUEST_STATISTICS, 11),
        ("DashInfer AsEngineStat", ENGINE_STATISTICS, 18),
        ("DashInfer field", GENERATION, 29),
    ],
)
def test_nothing_of_theirs_is_left_out(head: str, names: str, count: int) -> None:
    assert len(names.split()) == count
    listed = {name for row in table(head)[1:] for name in re.split(r", ", row[0])}
    assert set(names.split()) - listed == set()


def test_nothing_of_ours_is_left_out() -> None:
    named = {name for _, name in counterparts()}
    protocol = {name for name in vars(EngineProtocol) if not name.startswith("_")}
    assert protocol - named - set(re.findall(r"`(\w+)`", TEXT)) == set()
    for kind in (SamplingParams, RequestOptions):
        assert {field.name for field in fields(kind)} - named == set()


def test_status_codes_are_those_of_the_errors() -> None:
    rows = {row[0]: row[2] for row in table("number")[1:]}
    for error in errors.ERRORS.values():
        assert f"`{error.cls.__name__}`" in rows[str(int(error.status))]
    assert {str(int(code)) for code in errors.StatusCode} - set(rows) == set()
