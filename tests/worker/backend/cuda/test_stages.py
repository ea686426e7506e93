"""Stages of a pipeline on the CUDA kernels: the tokens of one rank, with several batches in flight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support import gpu_stages, mpirun
from support.thread_pipes import ThreadPipeline
from support.tiny_models import reference_logits, save_tiny

SHAPE: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 144,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
}


def assert_likely(tokens: list[list[int]], reference: Any) -> None:
    """Each token of the greedy requests is the reference's best after those before it, or nearly."""
    for one, output in zip(gpu_stages.asked(1), tokens, strict=True):
        if one.params.temperature:
            continue
        logits = reference_logits(reference, [*one.prompt_token_ids, *output])[len(one.prompt_token_ids) - 1 : -1]
        for token, row in zip(output, logits, strict=True):
            assert float(row.max() - row[token]) <= 0.05 * float(row.std())


def test_stages_of_emulated_kernels_make_the_tokens_of_the_model(tmp_path: Path, on: dict[str, Any]) -> None:
    if on["device"] == "cuda":
        pytest.skip("gpu: stages are processes there")
    reference = save_tiny(tmp_path, "llama", torch.bfloat16, **SHAPE | {"num_hidden_layers": 2}).float()
    settings = gpu_stages.config(tmp_path, "bfloat16", 2, on["device"])
    world = ThreadPipeline(2)

    def run(rank: int) -> dict[str, Any]:
        barrier, channel = world.world.barrier, world.channels[rank]
        return gpu_stages.run_stage(
            settings, world.collectives(rank), channel, 2, lambda: _ignore(barrier.wait(60)), rank == 0
        )

    made = world.world.run(run)[0]
    assert made["in_flight"] > 1
    assert_likely(made["tokens"], reference)


def _ignore(_: int) -> None:
    pass


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stages_that_are_processes_make_the_tokens_of_one(dtype: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "model", "llama", getattr(torch, dtype), **SHAPE).float()
    made = {}
    for stages in (1, 2):
        files = tmp_path / f"mpi{stages}"
        files.mkdir()
        run = mpirun.mpirun(
            stages, [gpu_stages.__file__, str(tmp_path / "model"), dtype, str(stages)], files, timeout=180
        )
        assert run.returncode == 0, run.stdout
        made[stages] = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
        assert_likely(made[stages]["tokens"], reference)
        assert (made[stages]["graphs"] > 0) == (dtype == "bfloat16")
    assert made[2]["in_flight"] > 1
    if dtype == "float32":
        assert made[2]["tokens"] == made[1]["tokens"]
