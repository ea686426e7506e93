"""Ranks with experts of their own, killed under running streams: outputs equal an undisturbed run's."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.errors import Unavailable
from support.byte_model import save_byte_model
from support.faults import SLOW_STEPS, make_fault
from support.serving import Served
from support.streams import Streams
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

TOKENS = 120
SLOW_READS = """
import time
from allspan.worker.models.holding import Holding

read_expert = Holding.read_expert

def slow_read(self, *arguments):
    time.sleep(0.15)
    return read_expert(self, *arguments)

Holding.read_expert = slow_read
"""
"""Experts move for about a second on the leader, longer than the test waits before it kills a rank."""


def test_ranks_killed_in_a_step_and_while_experts_move_change_no_token(runtime: Path, tmp_path: Path) -> None:
    model = save_byte_model(tmp_path / "model", "qwen2_moe", max_position_embeddings=4096)
    env = make_fault(tmp_path / "slow", 0, SLOW_STEPS + SLOW_READS).env
    flags = ("--ranks=2", "--oversubscribe", "--max-num-seqs=8", "--kv-cache-bytes=10000000", "--no-gateway")
    served = Served(model, *flags, "--enable-expert-parallel", "--redundant-experts=2", runtime=runtime, env=env)
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    params = [greedy, greedy, greedy.with_(temperature=0.9, seed=3, presence_penalty=0.4)]
    prompts = [[7, 9, 200], list(range(80)), [1]]
    try:
        served.wait_ready()
        with ClientEngine(attach=served.run_dir, resume_timeout=60.0) as engine:
            expected = [done.token_ids for done in engine.generate(prompts, params)]
            counted = engine.statistics().experts
            assert [load.layer for load in counted] == [0, 1]
            assert all(load.choices >= 2 * 3 * TOKENS for load in counted)
            streams = Streams(engine, prompts, params)
            streams.read_until(lambda: streams.count >= TOKENS, 60.0, f"{TOKENS} tokens")
            os.kill(served.rank_pid(1), signal.SIGKILL)
            assert streams.read_to_the_end() == expected

            streams = Streams(engine, prompts, params)
            streams.read_until(lambda: streams.count >= TOKENS, 60.0, f"{TOKENS} tokens")
            with ThreadPoolExecutor(1) as caller:
                moving = caller.submit(engine.rebalance_experts, 60.0)
                time.sleep(0.1)
                assert not moving.done(), moving.exception()
                os.kill(served.rank_pid(1), signal.SIGKILL)
                assert streams.read_to_the_end() == expected
                assert isinstance(moving.exception(30), Unavailable)
            engine.rebalance_experts(60.0)
            assert [done.token_ids for done in engine.generate(prompts, params)] == expected
        wait_until(lambda: served.cluster()["epoch"] == 3, 10.0, "the last epoch")
        assert served.ask_to_end() == 0
    finally:
        served.kill()
        print(served.log)  # shown when the test fails
