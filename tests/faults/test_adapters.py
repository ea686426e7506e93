"""Adapters that come and go while ranks fail: all ranks have one or none, and streams go on with theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.errors import AdapterNotFound, InvalidRequest, Unavailable
from allspan.protos.api.options import RequestOptions
from support.byte_model import save_byte_model
from support.faults import SLOW_STEPS, make_fault
from support.peft_adapters import save_adapter
from support.serving import Served
from support.streams import Streams
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

TOKENS = 120
READING = """
import os
from allspan.protos.api.errors import CheckpointError
from allspan.worker.adapters.slots import AdapterSlots

stage, told = AdapterSlots.stage, []

def faulty(self, *arguments):
    if due():
        told.append(1)
        if len(told) == 2:
            os.kill(os.getpid(), 9)
        raise CheckpointError("/one: cannot be read: Permission denied")
    return stage(self, *arguments)

AdapterSlots.stage = faulty
"""
"""The first time the file cannot be read, the second time the rank dies."""


def test_a_rank_that_cannot_read_an_adapter_or_dies_of_it_loses_no_token(runtime: Path, tmp_path: Path) -> None:
    model = save_byte_model(tmp_path / "model", "qwen2", max_position_embeddings=4096)
    weights = AutoModelForCausalLM.from_pretrained(model)
    for seed, name in enumerate(("one", "two")):
        save_adapter(tmp_path / name, weights, 8, seed=seed)
    fault = make_fault(tmp_path / "fault", 1, SLOW_STEPS + READING)
    flags = ("--ranks=2", "--oversubscribe", "--max-num-seqs=8", "--kv-cache-bytes=10000000", "--no-gateway")
    served = Served(model, *flags, f"--lora-dir={tmp_path}", runtime=runtime, env=fault.env)
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    prompts, params = [[7, 9, 200]] * 2, [greedy, greedy]
    options = [RequestOptions(), RequestOptions(adapter="one")]
    try:
        served.wait_ready()
        with ClientEngine(attach=served.run_dir, resume_timeout=60.0) as engine:
            fault.fire()
            with pytest.raises(
                InvalidRequest, match="the adapter 'one' cannot be loaded: rank 1: /one: cannot be read"
            ):
                engine.load_lora("one", "one")
            assert engine.list_loras() == ()
            engine.load_lora("one", "one")
            expected = [engine.generate([prompts[0]], greedy, each)[0].token_ids for each in options]
            assert expected[0] != expected[1]

            streams = Streams(engine, prompts, params, options)
            streams.read_until(lambda: streams.count >= 20, 60.0, "20 tokens")
            fault.fire()
            with pytest.raises(Unavailable):
                engine.load_lora("two", "two")
            assert streams.read_to_the_end() == expected
            wait_until(lambda: served.cluster()["epoch"] == 2, 10.0, "the next epoch")
            assert [each.name for each in engine.list_loras()] == ["one"]
            with pytest.raises(AdapterNotFound, match="'two'"):
                engine.generate([[1]], greedy, RequestOptions(adapter="two"))
            engine.load_lora("two", "two")
            assert engine.unload_lora("one") == 0
            assert [each.name for each in engine.list_loras()] == ["two"]
        with ClientEngine(attach=served.run_dir) as engine:  # another client sees what is there
            assert [each.name for each in engine.list_loras()] == ["two"]
        assert served.ask_to_end() == 0
    finally:
        served.kill()
        print(served.log)  # shown when the test fails
