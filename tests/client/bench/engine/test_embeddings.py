"""The report of `allspan bench embeddings` from the times of its calls."""

from __future__ import annotations

import pytest

from allspan.client.bench.engine.embeddings import EmbeddingsConfig, prepare, summary, table
from allspan.protos.api.errors import ConfigError


def test_rates_are_medians_over_the_calls() -> None:
    report = summary(EmbeddingsConfig(num_inputs=8, input_len=4), [2.0, 1.0, 4.0])
    assert (report["inputs_per_s"], report["tokens_per_s"], report["call_s"]) == (4.0, 16.0, 2.0)
    assert report["spread"]["call_s"] == [1.0, 4.0]
    assert "4.0 a second" in table(report | {"peak_rss_bytes": [1 << 20]})


def test_the_context_fits_the_inputs() -> None:
    assert prepare(EmbeddingsConfig(input_len=4), {}) == {"max_model_len": 5}
    with pytest.raises(ConfigError, match="--max-model-len is 4"):
        prepare(EmbeddingsConfig(input_len=4), {"max_model_len": 4})
    with pytest.raises(ConfigError, match="--num-inputs is 0"):
        EmbeddingsConfig(num_inputs=0)
