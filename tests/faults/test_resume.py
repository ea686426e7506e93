"""Ranks killed under running streams: outputs equal an undisturbed run's; with another replica they go on soon."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from allspan import ClientEngine, Grammar, RequestOptions, SamplingParams
from support.faults import SLOW_STEPS, make_fault
from support.serving import Served
from support.streams import Streams
from support.waiting import wait_until

Start = Callable[..., Served]

pytestmark = pytest.mark.timeout(240)

RESUMED_WITHIN_S = 3.0
TOKENS = 200


def prompts(count: int) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(255) for _ in range(source.randint(1, 100))] for _ in range(count)]


def mixed(num_greedy: int, num_sampled: int) -> list[SamplingParams]:
    """Greedy ones, and seeded ones whose penalties look back over all that was generated; one of each in a grammar."""
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(
        max_tokens=TOKENS,
        temperature=0.9,
        top_p=0.95,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        no_repeat_ngram_size=4,
        ignore_eos=True,
    )
    words = Grammar("regex", "[a-z ]{300}")
    listed = [greedy] * num_greedy + [sampled.with_(seed=seed) for seed in range(num_sampled)]
    return [listed[0].with_(grammar=words), *listed[1:-1], listed[-1].with_(grammar=words)]


def streamed_text(served: Served) -> str:
    """A completion that the gateway streams, until its [DONE]."""
    body = {"prompt": "abc", "max_tokens": 2 * TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{served.http}/v1/completions", json.dumps(body).encode(), headers)
    text = ""
    with urllib.request.urlopen(request, timeout=90) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return text
            if data.startswith("{"):
                text += "".join(choice["text"] for choice in json.loads(data)["choices"])
    raise AssertionError("the stream ended without [DONE]")


@pytest.mark.parametrize("shares", [(40,), pytest.param((10, 25, 45, 60, 80), marks=pytest.mark.nightly)])
def test_killed_ranks_change_no_token_of_any_stream(start: Start, tmp_path: Path, shares: tuple[int, ...]) -> None:
    """Sixteen greedy streams, four seeded ones with penalties, and one over HTTP, with drafts; a rank is killed at each
    of `shares`, in percent of all tokens. Two kills in a row: test_experts.py."""
    env = make_fault(tmp_path / "slow", 0, SLOW_STEPS).env
    often = ("--max-failures=100", "--failure-window-s=1", "--resume-timeout=120")
    served = start("--max-num-seqs=32", "--speculative-config={}", *often, env=env)
    listed, params = prompts(20), mixed(16, 4)
    kills = [(share * 20 * TOKENS // 100, number % 2) for number, share in enumerate(shares)]
    with ClientEngine(attach=served.run_dir, resume_timeout=120.0) as engine:
        undrafted = engine.generate(listed, params, RequestOptions(speculation=False))
        expected = [done.token_ids for done in undrafted]
        expected_text = streamed_text(served)
        texts: list[str] = []
        over_http = threading.Thread(target=lambda: texts.append(streamed_text(served)))
        over_http.start()
        streams = Streams(engine, listed, params)
        for epoch, (count, rank) in enumerate(kills, start=1):
            streams.read_until(lambda: streams.count >= count, 60.0, f"{count} tokens")  # noqa: B023
            wait_until(lambda: (served.cluster()["epoch"], served.cluster()["state"]) == (epoch, "ready"), 30.0)  # noqa: B023
            assert not streams.is_over
            os.kill(served.rank_pid(rank), signal.SIGKILL)
        assert streams.read_to_the_end() == expected
        over_http.join(60.0)
    assert texts == [expected_text]
    assert served.cluster()["epoch"] == 1 + len(kills)
    assert served.ask_to_end() == 0


def test_with_another_replica_every_stream_goes_on_within_three_seconds(start: Start, tmp_path: Path) -> None:
    env = make_fault(tmp_path / "slow", 0, SLOW_STEPS).env
    served = start("--no-gateway", "--ranks=1", "--data-parallel-size=2", "--max-num-seqs=16", env=env)
    params = [each.with_(max_tokens=2 * TOKENS) for each in mixed(6, 2)]
    with ClientEngine(attach=served.run_dir) as engine:
        expected = [done.token_ids for done in engine.generate(prompts(8), params)]
        streams = Streams(engine, prompts(8), params)
        streams.read_until(lambda: all(len(tokens) > 20 for tokens in streams.tokens), 30.0, "tokens")
        info = json.loads((served.run_dir / "replica-1" / "cluster.json").read_text())
        os.kill(info["ranks"][0]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        streams.read()
        before = [len(tokens) for tokens in streams.tokens]
        assert engine.is_ready

        def all_go_on() -> bool:
            return all(len(tokens) > count for tokens, count in zip(streams.tokens, before, strict=True))

        streams.read_until(all_go_on, RESUMED_WITHIN_S - (time.monotonic() - killed), "every stream's next token")
        assert streams.read_to_the_end() == expected
        wait_until(lambda: engine.statistics().replicas_ready == 2, 30.0, "the second replica")
    assert served.ask_to_end() == 0
