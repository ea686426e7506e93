"""What benchmarks make of what they saw: arithmetic, settings, tables and pictures, without any cluster."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import random
from pathlib import Path
from typing import Any

import pytest

from allspan.client.bench import plot
from allspan.client.bench.engine.ops import OPS, OpsConfig
from allspan.client.bench.engine.perplexity import PERPLEXITY, PerplexityConfig, summary
from allspan.client.bench.engine.prefix import PREFIX, PrefixConfig
from allspan.client.bench.engine.step import STEP, StepConfig
from allspan.client.bench.load import Answer, percentile, spread
from allspan.client.bench.machine import machine, resident_bytes
from allspan.client.bench.report import columns
from allspan.client.bench.serving.overload import OVERLOAD, OverloadConfig
from allspan.client.bench.serving.soak import SOAK, SoakConfig
from allspan.client.bench.trend import trend
from allspan.protos.api.engine import EngineStatistics, RankStatistics
from allspan.protos.api.errors import ConfigError


def test_perplexity_is_over_all_tokens_not_over_windows() -> None:
    report = summary([[math.log(0.5)] * 3, [math.log(0.125)]])
    assert report["perplexity"] == pytest.approx(2 ** ((3 + 3) / 4))
    assert report["window_perplexities"] == [pytest.approx(2.0), pytest.approx(8.0)]
    assert (report["tokens"], report["windows"]) == (4, 2)
    deviation = math.log(4) * math.sqrt(3) / 4  # of three values at log 2 and one at log 8
    assert report["standard_error"] == pytest.approx(report["perplexity"] * deviation / 2)


def test_a_trend_is_found_with_its_error() -> None:
    draw = random.Random(1)
    flat = [(x / 60, 1e9 + draw.gauss(0, 1e6)) for x in range(600)]
    leak = [(x, y + 2e6 * x) for x, y in flat]
    slope, error = trend(flat)
    assert abs(slope) < 3 * error
    slope, error = trend(leak)
    assert slope == pytest.approx(2e6, rel=0.05)
    assert slope > 10 * error
    assert trend([(0, 1), (1, 3), (2, 5)]) == (2.0, 0.0)
    assert trend([(0, 1), (1, 2)]) == trend([(1, 1), (1, 2), (1, 3)]) == (0.0, 0.0)


def test_percentiles_medians_and_gaps() -> None:
    values = [float(value) for value in range(1, 201)]
    assert (percentile(values, 99), percentile(values, 50), percentile([7.0], 99), percentile([], 99)) == (
        198,
        100,
        7,
        0,
    )
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    answer = Answer(1.0, (2.0, 2.5, 2.5, 4.0), (1, 2, 3, 4), "length", None)
    assert (answer.ttft_s, answer.gaps_s) == (1.0, [0.5, 1.5])


def test_columns_line_up() -> None:
    assert (
        columns([("op", "calls"), ("linear", "7"), ("x", "1234567")])
        == "op        calls\nlinear        7\nx       1234567"
    )


def test_the_machine_is_described() -> None:
    facts = machine()
    assert facts["processors"] >= 1
    assert facts["memory_bytes"] > 1 << 28
    assert facts["processor"]


def test_memory_of_ranks_elsewhere_is_not_read() -> None:
    def rank(pid: int, host: str) -> RankStatistics:
        return RankStatistics(0, pid, host, "running", 0, 0.0, 0, 0, 0, 0.0, "")

    ranks = (rank(os.getpid(), platform.node()), rank(os.getpid(), "elsewhere"), rank(2**30, platform.node()))
    facts = EngineStatistics("m", 64, ranks, page_size=16)
    here, gone = resident_bytes(facts)
    assert here > 1 << 20
    assert gone == 0


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (PerplexityConfig, {"text": "x", "window": 1}, "--window is 1, must be at least 2"),
        (PrefixConfig, {"hits": (0, 100)}, "--hits is 0,100, must be percents from 0 to 99"),
        (PrefixConfig, {"hits": ()}, "--hits is"),
        (PrefixConfig, {"repeats": 0}, "--repeats is 0"),
        (OpsConfig, {"output_len": 1}, "--output-len is 1, must be at least 2"),
        (StepConfig, {"batch_sizes": (0,)}, "--batch-sizes is 0"),
        (StepConfig, {"output_len": 15}, "--output-len is 15, must be at least 16"),
        (OverloadConfig, {"factor": 1}, "--factor is 1, must be at least 2"),
        (SoakConfig, {"minutes": 0.0}, "--minutes is 0.0, must be at least 0.01"),
        (SoakConfig, {"cancel_percent": 60.0, "bad_percent": 50.0}, "more than 100"),
    ],
)
def test_settings_that_measure_nothing_are_refused(config: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**fields)


@pytest.mark.parametrize(
    ("benchmark", "config", "needed"),
    [
        (PERPLEXITY, PerplexityConfig(text=__file__, window=20, bos=True), 22),
        (PREFIX, PrefixConfig(prompt_len=20, output_len=4), 24),
        (OPS, OpsConfig(input_len=20, output_len=4), 24),
        (STEP, StepConfig(input_len=20, output_len=16), 36),
        (OVERLOAD, OverloadConfig(input_len=20, output_len=4), 52),
        (SOAK, SoakConfig(input_len=20, output_len=4), 24),
    ],
)
def test_the_cluster_is_made_large_enough_and_one_that_is_too_small_is_refused(
    benchmark: Any, config: Any, needed: int
) -> None:
    assert benchmark.prepare(config, {})["max_model_len"] == needed
    assert benchmark.prepare(config, {"max_model_len": 4096, "ranks": 2})["max_model_len"] == 4096
    with pytest.raises(ConfigError, match=rf"--max-model-len is {needed - 1}, must be at least .* \({needed}\)"):
        benchmark.run("nosuch", config, max_model_len=needed - 1)


def test_files_that_are_missing_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--text nowhere\.txt: no such file"):
        PERPLEXITY.run("nosuch", PerplexityConfig(text="nowhere.txt"))
    if importlib.util.find_spec("matplotlib"):
        with pytest.raises(ConfigError, match="there is no folder"):
            PREFIX.run("nosuch", PrefixConfig(plot=str(tmp_path / "no" / "x.png")))


def test_without_matplotlib_a_picture_is_refused_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[plots\]'"):
        PREFIX.run("nosuch", PrefixConfig(plot="x.png"))


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [
        {"cached_tokens": cached, "ttft_s": {"median": t, "min": t / 2, "max": 2 * t}, "ratio": t}
        for cached, t in ((0, 1.0), (992, 0.1))
    ]
    plot.plot_prefix(str(tmp_path / "x.png"), {"prompt_tokens": 1024, "curve": points}, "tiny")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
