"""Models that draft in the ranks of a GPU: whichever drafts, greedy tokens are those of transformers' model, a model
keeps its own drafts, and drafts are run before the host knows those ahead of them."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan.protos.api.results import Output
from allspan.protos.config.speculation import Speculation
from allspan.worker.backend.cuda.sampling import DeviceStep
from allspan.worker.engine.setup import LoadedEngine
from allspan.worker.parallel.base import GroupCapabilities
from allspan.worker.scheduler.drafting.costs import StepCosts
from allspan.worker.scheduler.drafting.draft_run_planner import FIRST_TRIALS, DrafterFacts, DraftRunPlanner
from support.cores import request
from support.gpu_drafting import (
    FIXED,
    SIZES,
    VOCAB,
    answers,
    assert_likely,
    assert_replayed,
    device_for,
    greedy,
    loaded,
    noted_plans,
)
from support.threads import FusingCollectives, ThreadCollectives, ThreadWorld
from support.tiny_models import prompt, save_tiny


class Fusing(FusingCollectives):
    """What ranks on GPUs offer."""

    capabilities = GroupCapabilities(fused_norms=(torch.bfloat16,))


@pytest.fixture
def on(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of a model."""
    return device_for(device, monkeypatch)


@dataclass(frozen=True)
class Models:
    """A model, another one that drafts, and transformers' model of the first."""

    model: Path
    small: Path
    reference: Any


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    reference = save_tiny(root / "model", "llama", torch.bfloat16, **FIXED, **SIZES | {"num_hidden_layers": 2})
    save_tiny(root / "small", "qwen3", torch.bfloat16, **FIXED, **SIZES, head_dim=16)
    return Models(root / "model", root / "small", reference.float())


def asks_for(folder: Path, **keys: Any) -> str:
    return json.dumps({"model": str(folder), "num_speculative_tokens": 3, **keys})


def test_greedy_tokens_are_the_models(models: Models, on: dict[str, str]) -> None:
    """In chunks, and behind pages that others have left."""
    asks = asks_for(models.small, quantization="int8")
    engine, first = loaded(models.model, on, asks), greedy((33, 14, 30), 16)
    found = answers(engine, first)
    ids = (*first[0].prompt_token_ids, *found[first[0].request_id].token_ids[:-1], 3)
    then = [request(9, ids, max_tokens=6, temperature=0.0)]
    assert_likely(found | answers(engine, then), [*first, *then], models.reference)
    counters = engine.core.statistics()
    assert counters.draft_tokens
    assert counters.prefix_hit_tokens >= 48
    assert_replayed(on)


@pytest.mark.parametrize("draft", [pytest.param("small", marks=pytest.mark.nightly), "model"])
def test_requests_that_are_preempted_go_on_with_their_tokens(draft: str, models: Models, on: dict[str, str]) -> None:
    requests = greedy((14, 13, 12, 15), 36)
    engine = loaded(models.model, on, asks_for(getattr(models, draft)), 7)
    assert_likely(answers(engine, requests), requests, models.reference)
    counters = engine.core.statistics()
    assert counters.preemptions
    assert counters.draft_tokens
    assert draft == "small" or counters.accepted_tokens > 0.9 * counters.draft_tokens


def test_a_model_keeps_its_own_drafts_of_sampled_tokens(models: Models, on: dict[str, str]) -> None:
    draws: list[dict[str, Any]] = [{}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.02, "presence_penalty": 0.5}]
    requests = [
        request(number, prompt(5 + number, VOCAB, number), max_tokens=16, temperature=1.0, seed=number, **draw)
        for number, draw in enumerate(draws)
    ]
    plain = answers(loaded(models.model, on), requests)
    engine = loaded(models.model, on, asks_for(models.model))
    found = answers(engine, requests)
    counters = engine.core.statistics()
    assert counters.accepted_tokens > 0.8 * counters.draft_tokens > 16
    if on["device"] != "cuda":  # there last bits depend on the rows beside
        assert [each.token_ids for each in found.values()] == [each.token_ids for each in plain.values()]


def noted_calls(engine: LoadedEngine, patch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each step of the (m)odel and of what (d)rafts, and each time the host (w)aits for tokens."""
    noted: list[str] = []

    def note(owner: Any, name: str, letter: str) -> None:
        called = getattr(owner, name)

        def noting(*arguments: Any) -> Any:
            noted.append(letter)
            return called(*arguments)

        patch.setattr(owner, name, noting)

    note(engine.model, "forward", "m")
    note(engine.draft_model, "forward", "d")
    note(DeviceStep, "result", "w")
    return noted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_run_before_the_host_knows_those_before_them(
    temperature: float, models: Models, on: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(models.model, on, asks_for(models.small))
    noted = noted_calls(engine, monkeypatch)
    answers(engine, [request(1, prompt(5, VOCAB), max_tokens=12, temperature=temperature, seed=3)])
    calls = "".join(noted)
    assert "mwdddwww" in calls
    assert not re.search("dw+d", calls)


def test_steps_are_planned_ahead_while_drafts_would_not_pay(
    models: Models, on: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, one = loaded(models.model, on, asks_for(models.model)), greedy([5], 30)
    plans = noted_plans(monkeypatch)
    for learns in (DraftRunPlanner, StepCosts):  # emulated kernels take other times
        monkeypatch.setattr(learns, "learn", lambda *told: None)
    slow = DrafterFacts(96, {1: 1e6, 64: 1e6})
    engine.core.draft_with(Speculation("draft_model", 3), {1: 1e-3, 64: 1e-3}, slow)
    assert_likely(answers(engine, one), one, models.reference)
    drafted = [i for i, plan in enumerate(plans) if plan.draft_runs]
    assert len(drafted) == FIRST_TRIALS
    assert not any(plans[i + 1].in_flight for i in drafted)
    assert sum(plan.in_flight for plan in plans) > 10


@pytest.mark.parametrize("kind", [ThreadCollectives, Fusing], ids=["parts of logits", "whole logits"])
def test_ranks_share_the_model_that_drafts(kind: type[ThreadCollectives], models: Models, on: dict[str, str]) -> None:
    """Of whole logits each rank draws for itself, as GPUs do that reach each other's memory."""
    if on["device"] == "cuda":
        pytest.skip("gpu: ranks are processes there")
    requests, world = greedy((33, 5)), ThreadWorld(2, timeout=60)
    world.collectives = [kind(world, rank) for rank in range(2)]
    engines: dict[int, LoadedEngine] = {}

    def run(rank: int) -> dict[bytes, Output]:
        engine = engines[rank] = loaded(models.model, on, asks_for(models.model), 60, world, rank)
        if rank == 0:
            world.collectives[rank].barrier()
            found = answers(engine, requests)
            engine.core.shutdown()
        else:
            found = {}
            for one in copy.deepcopy(requests):
                engine.core.submit(one)
            world.collectives[rank].barrier()
        engine.core.run()
        return found

    assert_likely(world.run(run, timeout=200)[0], requests, models.reference)
    counters = engines[0].core.statistics()
    assert counters.accepted_tokens > 0.9 * counters.draft_tokens > 10


def test_weights_of_both_models_go_and_come_back(models: Models, on: dict[str, str]) -> None:
    engine = loaded(models.model, on, asks_for(models.model))
    assert engine.draft_model is not None
    requests, tensors = greedy((9, 20), 8), engine.draft_model.weights.values()
    for number in range(2):
        assert_likely(answers(engine, requests), requests, models.reference)
        if number == 0:
            engine.weights.unload()
            assert on["device"] != "cuda" or not any(tensor.untyped_storage().size() for tensor in tensors)
            engine.weights.reload(lambda: None)
            engine.core._planner.invalidate(2)
    counters = engine.core.statistics()
    assert counters.accepted_tokens > 0.9 * counters.draft_tokens > 10


def test_a_model_that_the_kernels_do_not_run_drafts_on_plain_ops(
    models: Models, on: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama", torch.bfloat16, **FIXED, **SIZES, head_dim=20)
    requests = greedy((9, 20), 8)
    engine = loaded(models.model, on, asks_for(tmp_path))
    assert "a head size of 20 run on torch's own, slowly" in caplog.text
    assert_likely(answers(engine, requests), requests, models.reference)
    assert engine.core.statistics().draft_tokens
