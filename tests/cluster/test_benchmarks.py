"""Every benchmark, short, on a cluster of one rank with a tiny random model: what it reports adds up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan import ClientEngine
from allspan.client.bench.benchmark import Benchmark
from allspan.client.bench.engine.grammar import GRAMMAR, GrammarConfig
from allspan.client.bench.engine.ops import OPS, OpsConfig
from allspan.client.bench.engine.perplexity import PERPLEXITY, PerplexityConfig
from allspan.client.bench.engine.prefix import PREFIX, PrefixConfig
from allspan.client.bench.engine.speculation import SPECULATION, SpeculationConfig
from allspan.client.bench.engine.step import STEP, StepConfig
from allspan.client.bench.serving.overload import OVERLOAD, OverloadConfig
from allspan.client.bench.serving.serve import SERVE, ServeBenchConfig
from allspan.client.bench.serving.soak import SOAK, SoakConfig
from allspan.protos.api.errors import ConfigError
from support.byte_tokenizer import write_byte_tokenizer
from support.tiny_models import reference_logits, save_tiny

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 3
OPTIONS = {"max_queued_requests": 6}
LENGTH = 1024
"""Tokens that the model's context has room for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "tiny"


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """transformers' model; its tokens are bytes."""
    model = save_tiny(folder, "qwen3", vocab_size=256, eos_token_id=255, max_position_embeddings=LENGTH)
    config = (folder / "config.json").read_text()
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(config)
    return model


@pytest.fixture(scope="module")
def engine(folder: Path, reference: Any) -> Iterator[ClientEngine]:
    with ClientEngine(folder, ranks=1, threads=1, max_num_seqs=4, quiet=True, **OPTIONS) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture(scope="module")
def drafting(folder: Path, reference: Any) -> Iterator[ClientEngine]:
    with ClientEngine(folder, ranks=1, threads=1, max_num_seqs=4, quiet=True, speculative_config="{}") as made:
        yield made


def measured(benchmark: Benchmark, engine: ClientEngine, config: Any) -> dict[str, Any]:
    """The report; its table must be made without a complaint."""
    report = benchmark.measure(engine, config, dict(OPTIONS))
    assert benchmark.table(report)
    return report


@pytest.mark.parametrize("windows", [0, 2])
def test_perplexity_is_that_of_transformers(engine: ClientEngine, reference: Any, tmp_path: Path, windows: int) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    config = PerplexityConfig(text=str(tmp_path / "t.txt"), window=40, windows=windows)
    report = measured(PERPLEXITY, engine, config)
    ids = list(TEXT.encode())
    losses = []
    for start in range(0, 40 * (windows or len(ids) // 40), 40):
        window = ids[start : start + 40]
        logprobs = torch.log_softmax(reference_logits(reference, window), -1)
        losses += [-float(logprobs[i, token]) for i, token in enumerate(window[1:])]
    assert report["tokens"] == len(losses)
    assert report["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_a_text_too_short_for_its_windows_is_refused(engine: ClientEngine, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("short")
    for windows in (0, 3):
        with pytest.raises(ConfigError, match=r"has 5 tokens, must fill \d windows of 40"):
            measured(PERPLEXITY, engine, PerplexityConfig(text=str(tmp_path / "t.txt"), window=40, windows=windows))


def test_prefix_finds_exactly_the_full_pages_that_were_shared(engine: ClientEngine) -> None:
    page = engine.statistics().page_size
    config = PrefixConfig(prompt_len=4 * page, hits=(30, 60, 97), repeats=2, batch_size=2, output_len=2, rounds=2)
    report = measured(PREFIX, engine, config)
    assert [point["hit_percent"] for point in report["curve"]] == [0, 30, 60, 97]
    assert [point["cached_tokens"] for point in report["curve"]] == [0, page, 2 * page, 3 * page]
    assert report["curve"][0]["ratio"] == 1.0
    assert all(report["throughput"][name]["min"] > 0 for name in ("on_tokens_per_s", "off_tokens_per_s"))


def test_ops_are_timed_in_prefill_and_in_decode(engine: ClientEngine) -> None:
    report = measured(OPS, engine, OpsConfig(input_len=16, output_len=LENGTH - 16, batch_size=2))
    for phase in ("prefill", "decode"):
        assert {"packed_linear"} <= {op["op"] for op in report[phase]}
        assert sum(op["share"] for op in report[phase]) == pytest.approx(1.0)
        assert all(0 <= op["min_ms"] <= op["max_ms"] <= op["total_ms"] for op in report[phase])
    calls = {phase: max(op["count"] for op in report[phase]) for phase in report}
    assert calls["decode"] > calls["prefill"]


def test_step_counts_decode_steps_only(engine: ClientEngine) -> None:
    # As many as fit: on a fast machine a few hundred are over before the counters are read the second time.
    report = measured(STEP, engine, StepConfig(batch_sizes=(1, 3), output_len=LENGTH - 16, repeats=2))
    assert [batch["batch_size"] for batch in report["batches"]] == [1, 3]
    for batch in report["batches"]:
        assert 0 < batch["steps"] <= 2 * LENGTH
        assert 0 < batch["host_s"]["min"] <= batch["host_s"]["median"]
        assert batch["model_s"]["min"] > 0


def test_step_ends_with_an_error_when_the_context_ends_before_its_requests(engine: ClientEngine) -> None:
    with pytest.raises(ConfigError, match=r"--output-len is 10016, but a request ended after \d+ tokens"):
        measured(STEP, engine, StepConfig(batch_sizes=(2,), output_len=10_000, repeats=1))


def test_grammar_counts_its_masks_and_compares_like_with_like(engine: ClientEngine) -> None:
    report = measured(GRAMMAR, engine, GrammarConfig(batch_size=3, output_len=12, repeats=2))
    assert report["masks"]["masks"] == 3 * 12 * 3  # with the run that warms up
    assert 0 < report["masks"]["median_s"] <= report["masks"]["p99_s"] <= report["masks"]["most_s"]
    assert report["ratio"]["min"] > 0
    with pytest.raises(ConfigError, match="--kind is 'xml'"):
        GrammarConfig(kind="xml")


def test_overload_refuses_the_rest_and_comes_back_to_where_it_was(engine: ClientEngine) -> None:
    report = measured(OVERLOAD, engine, OverloadConfig(seconds=0.3, repeats=2, output_len=4, concurrency=3))
    assert report["queue_limit"] == 6
    assert report["pages_kept"] == 0
    for burst in report["bursts"]:
        assert burst["sent"] == 60
        assert burst["taken"] + burst["refused"] == 60
        assert burst["taken"] >= 6
        assert burst["refused"] == burst["told_to_come_back"] > 0
        assert burst["pages_free"] + burst["pages_cached"] == burst["pages_total"]
        assert burst["before_tokens_per_s"] > 0
        assert burst["after_tokens_per_s"] > 0


def test_soak_counts_what_went_well_and_what_went_wrong(engine: ClientEngine) -> None:
    config = SoakConfig(minutes=0.05, concurrency=3, input_len=40, output_len=8, cancel_percent=20, bad_percent=10)
    report = measured(SOAK, engine, config)
    requests = report["requests"]
    assert requests["unexpected"] == {}
    assert min(requests["finished"], requests["cancelled"], requests["refused"]) > 0
    assert report["canary"]["asked"] > 1
    assert report["canary"]["changed"] == 0
    assert report["left"] == {"running": 0, "waiting": 0, "pages_used": 0}
    assert report["memory"]["most_bytes"] > 1 << 20
    assert report["last_minute"]["requests"] > 0


def test_serve_starts_a_server_and_counts_what_it_answers(reference: Any, folder: Path) -> None:
    config = ServeBenchConfig(num_prompts=4, random_input_len=8, random_output_len=5, backend="openai")
    options = {"ranks": 1, "threads": 1, "max_num_seqs": 4, "max_model_len": 128, "no_restart": True}
    report = SERVE.run(str(folder), config, quiet=True, **options)
    assert (report["completed"], report["errors"]) == (4, {})
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (32, 20)
    assert SERVE.table(report)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_speculation_counts_the_drafts_and_compares_the_tokens(
    drafting: ClientEngine, tmp_path: Path, batch_size: int
) -> None:
    (tmp_path / "asked.txt").write_text(TEXT)
    config = SpeculationConfig(
        text=str(tmp_path / "asked.txt"), num_prompts=2, prompt_len=60, output_len=60, rounds=2, batch_size=batch_size
    )
    report = measured(SPECULATION, drafting, config)
    assert 0 <= report["accepted_tokens"] <= report["draft_tokens"]
    assert report["drafts"] > 0
    assert sum(report["accepted_per_position"]) * report["drafts"] == pytest.approx(report["accepted_tokens"])
    assert report["ratio"]["min"] <= report["ratio"]["median"] <= report["ratio"]["max"]
    assert (report["tokens_per_step"] is None) == (batch_size > 1)


@pytest.mark.nightly
def test_replayed_drafts_are_kept_as_often_as_was_asked_for(folder: Path, reference: Any, tmp_path: Path) -> None:
    (tmp_path / "asked.txt").write_text(TEXT)
    config = SpeculationConfig(
        text=str(tmp_path / "asked.txt"), num_prompts=2, prompt_len=60, output_len=250, replay_rate=0.8, one_token=True
    )
    options = SPECULATION.prepare(config, {"ranks": 1, "threads": 1, "quiet": True})
    with ClientEngine(folder, **options) as engine:
        report = measured(SPECULATION, engine, config)
    assert 0.7 < report["accepted_per_position"][0] < 0.9
    assert report["differing_answers"] == 0


def test_drafts_are_replayed_or_drafted_as_the_cluster_is_told() -> None:
    config = SpeculationConfig(text=__file__, replay_rate=0.6, num_drafts=3)
    assert json.loads(SPECULATION.prepare(config, {})["speculative_config"])["num_speculative_tokens"] == 3
    with pytest.raises(ConfigError, match="give one of --replay-rate and --speculative-config"):
        SPECULATION.prepare(config, {"speculative_config": "{}"})


@pytest.mark.parametrize(
    ("line", "why"), [("{", "line 1: no JSON"), ('{"answer": "x"}', "line 1: has none of messages, prompt")]
)
def test_speculation_names_the_line_that_it_cannot_ask(
    engine: ClientEngine, tmp_path: Path, line: str, why: str
) -> None:
    (tmp_path / "asked.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=why):
        SPECULATION.measure(engine, SpeculationConfig(dataset=str(tmp_path / "asked.jsonl")), {})
