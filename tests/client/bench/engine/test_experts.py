"""`allspan bench experts` on a layer of a few kilobytes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allspan.client.bench.engine.experts import ExpertBenchConfig, run, sizes_of
from allspan.launch.commands import bench
from allspan.protos.api.errors import ConfigError

_SIZES = {"hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def test_every_case_is_timed_and_the_bytes_are_those_of_the_experts_that_are_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"text_config": _SIZES}))
    flags = ["--shape", str(config), "--rows", "1,40", "--formats", "q8_0", "--threads", "2", "--rounds", "1"]
    assert bench.run(["experts", *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    cases = {(case["rows"], case["routing"]): case for case in report["cases"]}
    assert len(cases) == 6
    assert all(case["total_us"] > 0 and case["gb_s"] > 0 for case in report["cases"])
    assert cases[1, "uniform"]["distinct"] == cases[40, "one"]["distinct"] == 2
    assert cases[40, "one"]["imbalance"] == 4.0
    assert sorted(cases[40, "one"]["load"]) == [0] * 6 + [40] * 2
    assert all(sum(case["load"]) == 2 * case["rows"] for case in report["cases"])
    assert cases[40, "uniform"]["distinct"] > 7
    assert cases[1, "uniform"]["num_bytes"] == 2 * 3 * 64 * 32 * 34 / 32


def test_the_table_has_a_line_a_case_and_the_load_of_the_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(_SIZES))
    flags = ["--rows", "3", "--formats", "q4_0", "--routings", "one,uniform", "--threads", "1", "--rounds", "1"]
    assert bench.run(["experts", "--shape", str(config), *flags]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("µs\n") == 2
    assert "3 rows, one: 2 x 3, 6 x 0\n" in captured.out


def test_a_format_that_no_kernel_has_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(_SIZES))
    with pytest.raises(ConfigError, match="there is no 'q9_9' on the CPU, but f32"):
        run(ExpertBenchConfig(shape=str(config), formats="q9_9"), tell=print)


def test_a_config_that_is_no_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ConfigError, match="no num_experts or n_routed_experts"):
        sizes_of(str(config))
    with pytest.raises(ConfigError, match="no file of that name, nor one of"):
        sizes_of("some-model")


@pytest.mark.parametrize("flags", [{"rows": "1,x"}, {"rows": "0"}, {"routings": "even"}, {"rounds": 0}])
def test_settings_that_say_nothing_are_refused(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        ExpertBenchConfig(**flags)  # type: ignore[arg-type]
