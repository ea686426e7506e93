"""The figures of `allspan bench pipeline`."""

from __future__ import annotations

import pytest

from allspan.client.bench.engine.pipeline import PIPELINE, PipelineConfig, Round, compared, prepare, table


def test_stages_are_compared_with_one_rank_round_by_round() -> None:
    one = [Round(1.0, 100, (0.8,), 10), Round(2.0, 100, (0.8,), 10)]
    stages = [Round(2.0, 400, (1.6, 0.8), 40), Round(2.0, 400, (1.6, 0.8), 40)]
    report = compared(one, stages)
    assert report["speedup_spread"] == [2.0, 4.0]
    assert report["pipeline"]["idle"] == pytest.approx([0.2, 0.6])
    assert report["pipeline"]["busy_s_per_step"] == pytest.approx([0.04, 0.02])
    assert report["speedup_by_busy_time"] == pytest.approx(2.0)
    assert "3.00 times the tokens a second (from 2.00 to 4.00)" in table(report | {"processors": 2})


def test_each_batch_of_the_pipeline_is_as_large_as_one_ranks() -> None:
    options = prepare(PipelineConfig(batch_size=3), {"pipeline_parallel_size": 3})
    assert (options["pipeline_batches"], options["max_num_seqs"], options["threads"]) == (6, 18, 1)
    assert prepare(PipelineConfig(), {})["pipeline_parallel_size"] == 2
    assert "Two clusters" in PIPELINE.cluster
