"""Models and heads that draft in the ranks of a GPU: whichever drafts, greedy tokens are those of transformers' model,
a model keeps its own drafts, and drafts are run before the host knows those ahead of them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan.kernels.ops import OpSet
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.results import Output
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.protos.config.speculation import Speculation
from allspan.worker.backend.cuda.sampling import DeviceSampling, DeviceStep
from allspan.worker.engine.setup import LoadedEngine, load_engine
from allspan.worker.engine.steps import step_times
from allspan.worker.engine.steps.draft_head import DraftHead
from allspan.worker.engine.steps.runner import Runner
from allspan.worker.load.loader import open_ops
from allspan.worker.models.spec import HeadSpec
from allspan.worker.parallel.base import GroupCapabilities
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.kernel import sampling_kernel
from allspan.worker.scheduler.drafting.costs import StepCosts
from allspan.worker.scheduler.drafting.draft_run_planner import FIRST_TRIALS, DrafterFacts, DraftRunPlanner
from allspan.worker.scheduler.plan import StepPlan
from allspan.worker.scheduler.request import Request
from allspan.worker.step.rank_drafter import Drafted, DraftRows, DraftRun, RanStep
from support.cores import Collected, request
from support.draft_heads import Mtp, save_eagle3
from support.emulator.backend import RecordingBackend, add_device
from support.threads import FusingCollectives, ThreadCollectives, ThreadWorld
from support.tiny_models import prompt, reference_logits, save_tiny

VOCAB = 104
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
FIXED = {"eos_token_id": None, "bos_token_id": None, "vocab_size": VOCAB}


class Fusing(FusingCollectives):
    """What ranks on GPUs offer."""

    capabilities = GroupCapabilities(fused_norms=(torch.bfloat16,))


class GpuLikeBackend(RecordingBackend):
    """Steps are recorded, and tokens stay where they are sampled."""

    def sampling(self, max_rows: int, width: int, ops: OpSet) -> Sampling:
        small = {"threads": 64, "capacity": 288}
        device = DeviceSampling(max_rows, width, torch.device("cpu"), small)
        return Sampling(sampling_kernel(ops.runtime), device)


@pytest.fixture
def on(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of a model."""
    monkeypatch.setattr(step_times, "MOST_SECONDS", 0.0)
    monkeypatch.setattr(RecordingBackend, "made", [])
    return {"device": "cuda"} if device == "cuda" else add_device(monkeypatch, "like a GPU", GpuLikeBackend)


def loaded(
    folder: Path, on: dict[str, str], asks: str = "", pages: int = 60, world: ThreadWorld | None = None, rank: int = 0
) -> LoadedEngine:
    """An engine of one rank, or of `world`; with `asks` it drafts up to three tokens, whether that pays or not."""
    config = WorkerConfig(
        ModelConfig(str(folder), "tiny", "bfloat16", max_model_len=96, **on),
        ServiceConfig("-"),
        CacheConfig(page_size=16, kv_cache_bytes=2**22),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, speculative_config=asks),
    )
    world = world or ThreadWorld(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("allspan.worker.engine.setup.num_kv_pages", lambda cache, demand: (pages,) * len(demand.groups))
        patch.setattr("allspan.worker.engine.setup.ends_of", lambda model, spec: ())
        found = load_engine(config, open_ops(config), world.collectives[rank], world.channels[rank])
    if (drafter := found.draft_model) is not None and rank == 0:
        facts = DrafterFacts(drafter.max_model_len, follows=isinstance(drafter.spec, HeadSpec))
        found.core.draft_with(Speculation("draft_model", 3), drafter=facts)
    for replays in RecordingBackend.made:  # steps were timed
        replays.clear()
    return found


def answers(engine: LoadedEngine, *rounds: Sequence[Request]) -> dict[bytes, Output]:
    """What requests get, those of each round side by side when the ones before are over."""
    collected = engine.core.on_outputs = Collected()
    for requests in rounds:
        for one in copy.deepcopy(requests):
            engine.core.submit(one)
        while engine.core.step():
            engine.core.check()
    assert not collected.errors
    return collected.outputs


def assert_likely(found: dict[bytes, Output], requests: Sequence[Request], reference: Any) -> None:
    """Each token is the reference's best after those before it, or as good but for what 16 bits round away."""
    for one in requests:
        ids, output = list(one.prompt_token_ids), found[one.request_id].token_ids
        assert len(output) == one.params.max_tokens
        logits = reference_logits(reference, [*ids, *output])[len(ids) - 1 : -1]
        for token, row in zip(output, logits, strict=True):
            assert float(row.max() - row[token]) <= 0.05 * float(row.std())


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


LATENT = {
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token follows from the last one alone, and whose layer for multi-token prediction knows how:
    no layer adds anything, and a row of the head is an embedding of another token."""
    folder = tmp_path_factory.mktemp("mtp")
    mtp = Mtp(folder, "deepseek_v3", **LATENT, **FIXED)
    mtp.rewrite(folder, {"self_attn.o_proj": 0.0, "down_proj": 0.0}, torch.eye(96, 192))
    return folder


def asks_for(folder: Path, **keys: Any) -> str:
    return json.dumps({"model": str(folder), "num_speculative_tokens": 3, **keys})


def assert_replayed(on: dict[str, str]) -> None:
    """Where recordings are those of tests, the model's and the drafter's were replayed."""
    if on["device"] != "cuda":
        assert all(RecordingBackend.made[-2:])


def greedy(lengths: Sequence[int], count: int = 12) -> list[Request]:
    return [
        request(number, prompt(length, VOCAB, number), max_tokens=count, temperature=0.0)
        for number, length in enumerate(lengths)
    ]


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
    plans: list[StepPlan] = []
    launch = Runner.launch

    def noting(runner: Runner, plan: StepPlan, *rest: Any) -> None:
        plans.append(plan)
        launch(runner, plan, *rest)

    monkeypatch.setattr(Runner, "launch", noting)
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


def test_a_layer_that_knows_what_follows_is_right(following: Path, on: dict[str, str]) -> None:
    requests = [
        request(number, prompt(5 + 30 * (number == 1), VOCAB, number), max_tokens=14, temperature=temperature, seed=4)
        for number, temperature in enumerate((0.0, 0.0, 3.0))
    ]
    plain = answers(loaded(following, on), requests)
    engine = loaded(following, on, '{"method": "mtp"}')
    found = answers(engine, requests)
    counters = engine.core.statistics()
    assert [each.token_ids for each in found.values()] == [each.token_ids for each in plain.values()]
    assert counters.accepted_tokens == counters.draft_tokens > 3 * 6
    assert_replayed(on)


def test_a_head_that_the_models_kernels_do_not_run_is_refused(
    models: Models, on: dict[str, str], tmp_path: Path
) -> None:
    save_eagle3(tmp_path, VOCAB, 90, 64, 64, head_dim=20, eagle_aux_hidden_state_layer_ids=[0, 1, 1])
    asks = json.dumps({"method": "eagle3", "model": str(tmp_path)})
    with pytest.raises(ConfigError, match="the head has a head size of 20 and 2 query heads a KV head"):
        loaded(models.model, {**on, "load_format": "dummy"}, asks)


@pytest.mark.parametrize("norms", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_head_drafts_what_it_drafts_on_a_cpu(
    norms: bool, tmp_path: Path, on: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as 16 bits tell; whatever it is, tokens are the model's."""
    sizes = SIZES | {"num_hidden_layers": 6}
    reference = save_tiny(tmp_path / "model", "llama2", torch.bfloat16, **FIXED, **sizes).float()
    save_eagle3(tmp_path / "head", VOCAB, 90, 64, 64, norm_before_fc=norms)
    requests = greedy((14, 13, 35, 15), 24)
    asks = json.dumps({"method": "eagle3", "model": str(tmp_path / "head")})
    noted: list[dict[tuple[int, ...], Sequence[int]]] = []
    draft = DraftHead.draft

    def noting(head: DraftHead, runs: Sequence[DraftRun], rows: DraftRows, ran: RanStep) -> Mapping[int, Drafted]:
        found = draft(head, runs, rows, ran)
        noted[-1] |= {
            tuple(rows.tokens[row, : each.num_tokens].tolist()): each.drafts
            for row, each in found.items()
            if each.drafts
        }
        return found

    monkeypatch.setattr(DraftHead, "draft", noting)
    for where in (on, {"device": "cpu"}):
        noted.append({})
        engine = loaded(tmp_path / "model", where, asks, 8)
        found, counters = answers(engine, requests), engine.core.statistics()
        assert_likely(found, requests, reference)
        assert counters.draft_tokens
        assert counters.preemptions
    both = [(noted[0][tokens], noted[1][tokens]) for tokens in noted[0].keys() & noted[1].keys() if noted[0][tokens]]
    assert len(both) > 20
    assert sum(one == other for one, other in both) > 0.8 * len(both)
