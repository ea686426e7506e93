"""Experts that change ranks beside a model's steps: what a rank then holds is what it would have read at its start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from allspan.kernels.packer import Packer
from allspan.kernels.table import op_set
from allspan.protos.api.errors import CheckpointError, DeadlineExceeded, Unavailable
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load.expert_moves import ExpertMoves, rebalance_regularly
from allspan.worker.load.loader import CheckpointWeights, open_checkpoint, prepare
from allspan.worker.models.model import Model
from allspan.worker.scheduler.plan import Operation
from support.family_rows import FAMILIES, save_family, stacked
from support.mxfp4_model import save_mxfp4
from support.threads import ThreadWorld
from support.tiny_models import load_model, prefill, prompt, relative_error, save_tiny

RANKS = 4
IDS = prompt(60, 97)
CACHE = CacheConfig(page_size=16)


def settings(folder: Path, **more: Any) -> ModelConfig:
    return ModelConfig(str(folder), "tiny", enable_expert_parallel=True, **{"redundant_experts": 3} | more)


def on_ranks(config: ModelConfig, run: Callable[[Model, ExpertMoves], Any], fails_on: int = -1) -> list[Any]:
    """What each rank makes of its model, which has run a prompt, and its moves."""
    world = ThreadWorld(RANKS)

    def one(rank: int) -> Any:
        def opened() -> CheckpointWeights:
            if rank == fails_on:
                raise CheckpointError("the disk is gone")
            found = prepare(config, CACHE, rank, RANKS)
            return CheckpointWeights(found.holding, open_checkpoint(found.source, "auto"))

        model = load_model(config, world.collectives[rank], op_set("cpu"), 60, 60, cache=CACHE)
        packer = Packer(op_set("cpu").runtime)
        return run(model, ExpertMoves(model, config, world.collectives[rank], opened, packer))

    return world.run(one)


def advance_all(moves: ExpertMoves) -> None:
    deadline = time.monotonic() + 20
    while moves.num_left:
        moves.advance()
        assert time.monotonic() < deadline


@pytest.mark.parametrize(("quantization", "groups"), [("none", 4), ("int8", 2), ("auto", 2)])
def test_moved_experts_are_those_that_a_rank_with_this_placement_reads(
    quantization: str, groups: int, tmp_path: Path
) -> None:
    """ "auto": gpt-oss, whose experts in MXFP4 have biases."""
    if quantization == "auto":
        save_mxfp4(tmp_path)
    else:
        save_tiny(tmp_path, "qwen2_moe")
    config = settings(tmp_path, quantization=quantization, expert_parallel_size=groups)

    def run(model: Model, moves: ExpertMoves) -> Any:
        (before,) = prefill(model, [IDS], 60)
        was = dict(model.holding.placements)
        busiest = [max(load.groups) for load in model.expert_loads()]
        moves.begin()
        advance_all(moves)
        after = [max(load.groups) for load in model.expert_loads()]
        assert all(now <= then for now, then in zip(after, busiest, strict=True))
        assert sum(after) < sum(busiest)
        assert model.holding.placements != was
        checkpoint = open_checkpoint(prepare(config, CACHE, 0, RANKS).source, "auto")
        assert {tensor.dtype for tensor in model.weights.values()} >= {torch.uint8}
        for name, tensor in model.holding.read(checkpoint, "cpu").items():
            assert torch.equal(tensor, model.weights[name]), name
        (logits,) = prefill(model, [IDS], 60)
        if quantization != "auto":  # inputs of 8 bits flip a token's choice at times
            assert relative_error(logits, before) < 1e-4
        moved = dict(model.holding.placements)
        moves.begin()  # by the second prompt's tokens, which are the first one's
        advance_all(moves)
        assert model.holding.placements == moved
        return moved

    placements = on_ranks(config, run)
    assert placements == [placements[0]] * RANKS


def test_a_rank_that_cannot_read_leaves_every_rank_as_it_was(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2_moe")

    def run(model: Model, moves: ExpertMoves) -> None:
        (before,) = prefill(model, [IDS], 60)
        was = dict(model.holding.placements)
        for _ in range(2):  # the tokens count until experts have moved by them
            moves.begin()
            with pytest.raises(CheckpointError, match="rank 3 could not read experts"):
                advance_all(moves)
            assert moves.num_left == 0
        assert model.holding.placements == was
        assert torch.equal(prefill(model, [IDS], 60)[0], before)

    on_ranks(settings(tmp_path), run, fails_on=3)


def test_experts_that_a_folder_spells_otherwise_by_now_move(tmp_path: Path) -> None:
    save_family(tmp_path, FAMILIES["qwen3_moe"])
    file, together = tmp_path / "model.safetensors", threading.Barrier(RANKS)

    def run(model: Model, moves: ExpertMoves) -> None:
        (before,) = prefill(model, [IDS], 60)
        was = dict(model.holding.placements)
        if together.wait(20) == 0:
            save_file(stacked(load_file(file)), file, {"format": "pt"})
        together.wait(20)
        moves.begin()
        advance_all(moves)
        assert model.holding.placements != was
        assert relative_error(prefill(model, [IDS], 60)[0], before) < 1e-4

    on_ranks(settings(tmp_path, redundant_experts=0), run)


def test_moves_that_are_dropped_end_for_the_caller_with_the_reason(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2_moe")

    def run(model: Model, moves: ExpertMoves) -> None:
        prefill(model, [IDS], 60)
        was = dict(model.holding.placements)
        at: list[Operation] = []

        def operate(operation: Operation, timeout: float) -> None:
            at.append(operation)
            (moves.begin if operation is Operation.REBALANCE_EXPERTS else moves.advance)()
            if len(at) == 1:
                with pytest.raises(DeadlineExceeded, match=r"another call has not moved its experts within 0\.01 s"):
                    moves.rebalance(operate, 0.01)
                moves.drop("the weights were unloaded")

        with pytest.raises(Unavailable, match="the weights were unloaded"):
            moves.rebalance(operate, 20.0)
        assert at == [Operation.REBALANCE_EXPERTS]
        moves.advance()  # a plan that was on its way
        assert moves.num_left == 0
        assert model.holding.placements == was

    on_ranks(settings(tmp_path), run)


def test_what_keeps_experts_from_moving_now_is_tried_again_until_the_end() -> None:
    ended, timeouts = threading.Event(), []

    def rebalance(timeout: float) -> None:
        timeouts.append(timeout)
        if len(timeouts) == 3:
            ended.set()
        raise Unavailable("the weights are unloaded") if len(timeouts) == 1 else OSError("no such device")

    rebalance_regularly(rebalance, 0.01, ended)
    assert timeouts == [0.01] * 3


def test_slices_of_every_expert_cannot_move(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2_moe")

    def run(model: Model, moves: ExpertMoves) -> None:
        with pytest.raises(Unavailable, match="start with --enable-expert-parallel"):
            moves.begin()

    on_ranks(ModelConfig(str(tmp_path), "tiny"), run)
