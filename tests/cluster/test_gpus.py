"""Clusters with a GPU a rank: the tokens of the CPU's, and what a dead rank leaves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.launch.placement.gpus import find_gpus, visible_gpus
from support.default_model import chat_prompts, reference_logits
from support.equality import assert_nearly_greedy
from support.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[3 + (7 * i + j) % 90 for j in range(length)] for i, length in enumerate((1, 5, 33, 64, 130))]
SLACK = 300
"""MiB: other programs on the GPU."""


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if len(visible_gpus(find_gpus())) < 2:
        pytest.skip("gpu: two of them are needed")


def used_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    run = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    return sum(map(int, run.stdout.split()))


@pytest.mark.parametrize("flags", [{"ranks": 2}, {"ranks": 1, "data_parallel_size": 2}])
def test_greedy_output_on_two_gpus_is_that_of_the_cpu(
    start_tiny: Callable[..., ClientEngine], flags: dict[str, int]
) -> None:
    small = {"dtype": "float32", "max_model_len": 512, "gpu_memory_utilization": 0.1}
    with start_tiny(ranks=1, dtype="float32", max_model_len=512) as engine:
        expected = [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)]
    with start_tiny(device="cuda", **small, **flags) as engine:
        found = [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)]
    assert found == expected


def test_greedy_output_of_the_default_model_on_two_gpus_is_that_of_transformers(
    start: Callable[..., ClientEngine],
) -> None:
    prompts = chat_prompts()
    params = replace(GREEDY, max_tokens=64, ignore_eos=False)
    with start(ranks=2, device="cuda", max_model_len=1024, gpu_memory_utilization=0.1) as engine:
        outputs = engine.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_nearly_greedy(output.token_ids, reference_logits(prompt, list(output.token_ids)), f"{prompt[:4]}")


def test_sampled_output_is_the_same_twice_on_two_gpus(start_tiny: Callable[..., ClientEngine]) -> None:
    params = replace(GREEDY, temperature=0.9, top_p=0.9, seed=7, max_tokens=64)
    with start_tiny(device="cuda", max_model_len=512, gpu_memory_utilization=0.1) as engine:
        first, second = ([completion.token_ids for completion in engine.generate(PROMPTS, params)] for _ in range(2))
    assert first == second
    assert {len(ids) for ids in first} == {64}


def test_a_killed_rank_leaves_no_memory_of_its_gpu_taken(start_tiny: Callable[..., ClientEngine]) -> None:
    before = used_mib()
    with start_tiny(device="cuda", max_model_len=512, gpu_memory_utilization=0.5) as engine:
        assert used_mib() > before + SLACK
        victim = engine.cluster.ranks[1].pid
        os.kill(victim, signal.SIGKILL)
    wait_until(lambda: used_mib() < before + SLACK, what="free memory of the GPUs")
