"""The figures of `allspan bench adapters`."""

from __future__ import annotations

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
    lines = ADAPTERS.table(report).splitlines()
    assert lines[-1].split() == ["decode", "20.0", "18.0", "0.950", "(0.900", "to", "1.000)"]


def test_a_cluster_without_adapters_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="--lora-modules is missing"):
        ADAPTERS.prepare(AdaptersConfig(), {})
