"""The streaming benchmark: its arithmetic, and what it refuses."""

from __future__ import annotations

import asyncio

import pytest

from allspan.client.bench.serving.streaming import StreamingConfig, Turn, prepare, summary, table
from allspan.client.bench.serving.streaming_script import SIDES, Received
from allspan.protos.api.errors import ConfigError
from support.gateway import fake_engine, gateway


def test_ratios_are_medians_over_the_engines_and_their_spread_is_that_of_the_rounds() -> None:
    engine = [Turn(1000, 10, 1.0, 2.0), Turn(1000, 10, 2.0, 2.0), Turn(1000, 10, 4.0, 2.0)]
    grpc = [
        Turn(1000, 300, 2.0, 0.1, 0.2, 2.0),
        Turn(1000, 300, 2.5, 0.1, 0.2, 2.0),
        Turn(1000, 300, 4.0, 0.1, 0.5, 2.0),
    ]
    report = summary({"engine": engine, "grpc": grpc})
    assert report["engine"]["ratio"] == 1.0
    assert report["grpc"]["tokens_per_s"] == {"median": 400.0, "min": 250.0, "max": 500.0}
    assert report["grpc"]["ratio"] == pytest.approx(0.8)
    assert report["grpc"]["ratio_by_round"] == pytest.approx({"median": 0.8, "min": 0.5, "max": 1.0})
    assert report["grpc"]["messages_per_token"] == pytest.approx(0.3)
    assert report["grpc"]["cpu_s_per_1000_tokens"] == pytest.approx({"asking": 0.1, "gateway": 0.3, "ranks": 2.0})
    assert report["grpc"]["gap_s"] is None
    assert "0.800 x" in table({"streams": [{"streams": 32, "sides": report}]})


def test_gaps_stand_beside_the_engines_step_for_each_number_of_streams() -> None:
    engine = [Turn(100, 10, 1.0, 2.0, step_s=step_s) for step_s in (0.01, 0.02, 0.06)]
    gaps = [{"p50": 0.01 * n, "p90": 0.02 * n, "max": 0.05 * n} for n in (1, 3, 2)]
    chat = [Turn(100, 50, 1.0, 0.1, 0.2, 2.0, gap_s=gap) for gap in gaps]
    sides = summary({"engine": engine, "chat": chat})
    assert sides["chat"]["gap_s"] == pytest.approx({"p50": 0.02, "p90": 0.04, "max": 0.15})
    assert sides["engine"]["step_s"] == 0.02
    shown = table({"streams": [{"streams": 1, "sides": sides}, {"streams": 64, "sides": sides}]})
    assert "64 streams" in shown
    assert shown.count("step time of the engine in process: 20.0 ms") == 2


def test_both_engines_get_the_same_threads_and_a_context_that_fits() -> None:
    options = prepare(StreamingConfig(streams=(4, 2), input_words=1, output_len=10), {"threads": 3})
    assert (options["threads"], options["max_num_seqs"], options["max_model_len"]) == (3, 4, 270)
    with pytest.raises(ConfigError, match="--ranks is 2, must be 1"):
        prepare(StreamingConfig(), {"ranks": 2})
    with pytest.raises(ConfigError, match="--sides has 'web', known are engine, facade, grpc"):
        StreamingConfig(sides=("grpc", "web"))
    with pytest.raises(ConfigError, match="--streams is 4,0, must be numbers of at least 1"):
        StreamingConfig(streams=(4, 0))


@pytest.mark.parametrize("side", ["grpc", "completions", "chat"])
async def test_each_side_counts_every_token_that_a_gateway_streams(side: str) -> None:
    async with gateway(fake_engine(endless=True, step_s=0.002)) as running:
        address = running.grpc_address if side == "grpc" else running.http_address
        asked = {"prompts": [[65, 66], [67, 68]], "texts": ["one", "two"], "output_len": 9}

        def play() -> Received:
            asker = SIDES[side]({"side": side, "address": address, "model": "tiny"})
            received: Received = asker.round(asked)
            assert asker.round(asked).tokens == received.tokens, "connections are used again"
            asker.close()
            return received

        received = await asyncio.to_thread(play)
    assert received.tokens == 18
    assert received.messages >= 2
    assert 1 <= len(received.gaps) <= 16
    assert received.report()["gap_s"]["p50"] >= 0.001, "a step takes 2 ms"
