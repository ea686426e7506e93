"""The latency benchmark: its arithmetic, and a run against fake ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan import ClientEngine
from allspan.client.bench.engine.latency import LATENCY, LatencyConfig, Round, measure_rounds, round_from, summary
from allspan.client.bench.machine import versions
from allspan.protos.api.engine import EngineStatistics, RankStatistics
from allspan.protos.api.errors import ConfigError
from support.fake_worker import FakeCluster


def statistics(steps: int, host_s: float) -> EngineStatistics:
    ranks = tuple(RankStatistics(r, 1, "h", "running", 0, 0.0, 100 + r, 0, 0, 1.5 + r, "cpu/avx2") for r in range(2))
    return EngineStatistics("m", 64, ranks, page_size=16, steps=steps, host_s=host_s)


def test_rates_are_medians_of_tokens_over_their_own_time() -> None:
    config = LatencyConfig(batch_size=4, input_len=100, output_len=11)
    rounds = [Round(2.0, 1.0, 40, 4.0), Round(1.0, 2.0, 40, 5.5), Round(4.0, 4.0, 40, 8.0)]
    report = summary(config, rounds, statistics(10, 0.5), statistics(60, 1.0))
    assert report["prefill_tokens_per_s"] == 200.0
    assert report["decode_tokens_per_s"] == 20.0
    assert report["output_tokens_per_s"] == 8.0
    assert report["ttft_s"] == 2.0
    assert report["host_s_per_step"] == pytest.approx(0.01)
    assert report["load_s"] == 2.5
    assert report["peak_rss_bytes"] == [100, 101]
    assert report["spread"]["ttft_s"] == [1.0, 4.0]


def test_one_output_token_has_no_decode_rate() -> None:
    report = summary(LatencyConfig(output_len=1), [Round(1.0, 0.0, 0, 1.0)], statistics(0, 0.0), statistics(3, 0.0))
    assert report["decode_tokens_per_s"] == 0.0


def test_decode_begins_when_everybody_has_a_first_token() -> None:
    assert round_from(1.0, [[2.0, 2.5, 3.0], [2.5, 3.5, 4.0]]) == Round(1.5, 1.5, 3, 3.0)


def test_a_batch_whose_last_prompt_waited_for_the_others_has_a_decode_rate() -> None:
    assert round_from(0.0, [[1.0, 1.5], [2.0, 2.0]]) == Round(2.0, 1.0, 2, 2.0)
    assert round_from(0.0, [[1.0], [2.0]]).decode_tokens == 0


def test_a_context_that_would_cut_the_output_short_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len is 20, must be at least .* \(24\)"):
        LATENCY.run("nosuch", LatencyConfig(input_len=20, output_len=4), max_model_len=20)


def test_a_run_measures_every_round_with_new_prompts(tmp_path: Path) -> None:
    config = LatencyConfig(batch_size=3, input_len=16, output_len=8, repeats=2, warmup=1)
    with FakeCluster(tmp_path, step_s=0.002) as cluster, ClientEngine(attach=tmp_path) as engine:
        before, rounds, after = measure_rounds(engine, config)
        assert len({event[2] for event in cluster.events if event[0] == "start"}) == 9
    assert after.generated_tokens - before.generated_tokens == 2 * 3 * 8
    # 21, less those that came before the slowest request's first (on a busy machine, nearly any number).
    assert all(7 <= r.decode_tokens <= 21 for r in rounds)
    assert all(r.ttft_s > 0 and r.decode_s > 0 for r in rounds)
    assert versions(after)["kernels"] == "fake"


def test_several_batches_are_measured_on_one_cluster(tmp_path: Path) -> None:
    config = LatencyConfig(batches=("1x24x1", "3x16x8"), repeats=1, warmup=0)
    options = LATENCY.prepare(config, {})
    assert (options["max_num_seqs"], options["max_model_len"]) == (64, 25)
    with FakeCluster(tmp_path, step_s=0.002) as cluster, ClientEngine(attach=tmp_path) as engine:
        report = LATENCY.measure(engine, config, options)
        assert len({event[2] for event in cluster.events if event[0] == "start"}) == 4
    sizes = [(each["batch_size"], each["input_len"], each["output_len"]) for each in report["batches"]]
    assert sizes == [(1, 24, 1), (3, 16, 8)]
    assert [each["decode_tokens_per_s"] > 0 for each in report["batches"]] == [False, True]
    assert [line.split()[0] for line in LATENCY.table(report).splitlines()] == ["batch", "1x24x1", "3x16x8"]
    for batch in ("8x16", "0x16x8", "8x16x8x1", "ax1x1"):
        with pytest.raises(ConfigError, match=f"--batches has '{batch}', must be REQUESTSxINPUTxOUTPUT"):
            LatencyConfig(batches=(batch,))


@pytest.mark.parametrize("field", ["batch_size", "input_len", "output_len", "repeats"])
def test_settings_that_measure_nothing_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} is 0, must be at least 1"):
        LatencyConfig(**{field: 0})
