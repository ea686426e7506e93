"""The figures of `allspan bench adapter-loads`."""

from __future__ import annotations

import pytest

from allspan.client.bench.engine.adapter_loads import ADAPTER_LOADS, AdapterLoadsConfig, Load, summary
from allspan.protos.api.errors import ConfigError


def test_a_stall_is_the_longest_pause_that_a_load_has_a_part_in_less_a_step() -> None:
    ten_ms = [0.01 * number for number in range(101)]
    late = [*ten_ms[:60], *(moment + 0.05 for moment in ten_ms[60:])]  # a step of 60 ms
    report = summary([ten_ms, late], [Load(0.55, 0.61, 0.63, 0.65), Load(0.8, 0.85, 0.9, 0.91)])
    assert (report["step_ms"], report["longest_quiet_pause_ms"]) == (pytest.approx(10), pytest.approx(10))
    found = {name: [report[name][key] for key in ("least", "most")] for name in ("load_ms", "pause_ms", "stall_ms")}
    assert found["load_ms"] == [pytest.approx(50), pytest.approx(60)]
    assert found["pause_ms"] == [pytest.approx(10), pytest.approx(60)]
    assert found["stall_ms"] == [pytest.approx(0, abs=1e-6), pytest.approx(50)]
    lines = ADAPTER_LOADS.table(report | {"rss_growth_bytes": 2**20}).splitlines()
    assert lines[-2].split() == ["stall", "25.0", "0.0", "50.0"]
    assert lines[-1] == "a step without loads: 10.0 ms, at most 10.0; memory of the ranks: +1.0 MiB"


def test_without_an_adapter_to_load_it_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="--lora-modules is missing"):
        ADAPTER_LOADS.prepare(AdapterLoadsConfig(), {})
    options = ADAPTER_LOADS.prepare(AdapterLoadsConfig(context=512), {"lora_modules": ("a=/x",)})
    assert (options["max_loras"], options["max_model_len"]) == (2, 512)
