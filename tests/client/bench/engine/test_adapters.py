"""The figures of `allspan bench adapters`."""

from __future__ import annotations

from typing import Any

import pytest

from allspan.client.bench.engine.adapters import ADAPTERS, AdaptersConfig, compared
from allspan.client.bench.engine.latency import Round
from allspan.protos.api.errors import ConfigError


def test_ratios_are_those_of_the_pairs_with_their_spread() -> None:
    model = [Round(1.0, 2.0, 40, 3.0), Round(2.0, 2.0, 20, 4.0), Round(1.0, 2.0, 40, 3.0)]
    adapters = [Round(2.0, 2.0, 36, 4.0), Round(2.0, 2.0, 19, 4.0), Round(1.25, 2.0, 40, 4.0)]
    report = compared(AdaptersConfig(batch_size=2, input_len=10), model, adapters)
    assert report["prefill_tokens_per_s"] == {
        "model": 20.0,
        "adapters": 10.0,
        "ratio": pytest.approx(0.8),
        "ratio_spread": [0.5, 1.0],
    }
    decode = report["decode_tokens_per_s"]
    assert (decode["ratio"], decode["ratio_spread"]) == (pytest.approx(0.95), [pytest.approx(0.9), 1.0])
    assert report["output_tokens_per_s"]["model"] == pytest.approx(2 * 64 / 3)
    sizes = {"batch_size": 2, "input_len": 10, "output_len": 64, "distinct": 3}
    lines = ADAPTERS.table({"cases": [sizes | report]}).splitlines()
    assert lines[-2].split() == ["2x10x64", "3", "decode", "20.0", "18.0", "0.950", "(0.900", "to", "1.000)"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"distinct": ("1", "-1")}, "--distinct has '-1'"), ({"batches": ("4x4",)}, "--batches has '4x4'")],
)
def test_batches_and_numbers_of_adapters_that_are_none_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AdaptersConfig(**settings)


def test_a_cluster_without_adapters_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="--lora-modules is missing"):
        ADAPTERS.prepare(AdaptersConfig(), {})
