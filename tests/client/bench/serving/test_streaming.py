"""The streaming benchmark: its arithmetic, and what it refuses."""

from __future__ import annotations

import asyncio

import pytest

from allspan.client.bench.serving.streaming import StreamingConfig, Turn, prepare, summary, table
from allspan.client.bench.serving.streaming_script import SIDES
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
    assert "0.800 x" in table({"sides": report})


def test_both_engines_get_the_same_threads_and_a_context_that_fits() -> None:
    options = prepare(StreamingConfig(streams=4, input_words=1, output_len=10), {"threads": 3})
    assert (options["threads"], options["max_num_seqs"], options["max_model_len"]) == (3, 4, 270)
    with pytest.raises(ConfigError, match="--ranks is 2, must be 1"):
        prepare(StreamingConfig(), {"ranks": 2})
    with pytest.raises(ConfigError, match="--sides has 'web', known are engine, facade, grpc"):
        StreamingConfig(sides=("grpc", "web"))


@pytest.mark.parametrize("side", ["grpc", "completions", "chat"])
async def test_each_side_counts_every_token_that_a_gateway_streams(side: str) -> None:
    async with gateway(fake_engine(endless=True, step_s=0.002)) as running:
        address = running.grpc_address if side == "grpc" else running.http_address
        asked = {"prompts": [[65, 66], [67, 68]], "texts": ["one", "two"], "output_len": 9}

        def play() -> tuple[int, int]:
            asker = SIDES[side]({"side": side, "address": address, "model": "tiny"})
            tokens, messages = asker.round(asked)
            assert asker.round(asked)[0] == tokens, "connections are used again"
            asker.close()
            return tokens, messages

        tokens, messages = await asyncio.to_thread(play)
    assert tokens == 18
    assert messages >= 2
