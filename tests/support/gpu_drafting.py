"""Engines of tests whose drafters lie in the ranks of a GPU, or of a device that does as one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan.kernels.ops import OpSet
from allspan.protos.api.results import Output
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.protos.config.speculation import Speculation
from allspan.worker.backend.cuda.sampling import DeviceSampling
from allspan.worker.engine.setup import LoadedEngine, load_engine
from allspan.worker.engine.steps import step_times
from allspan.worker.engine.steps.runner import Runner
from allspan.worker.load.loader import open_ops
from allspan.worker.models.spec import HeadSpec
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.kernel import sampling_kernel
from allspan.worker.scheduler.drafting.draft_run_planner import DrafterFacts
from allspan.worker.scheduler.plan import StepPlan
from allspan.worker.scheduler.request import Request
from support.cores import Collected, request
from support.emulator.backend import RecordingBackend, add_device
from support.threads import ThreadWorld
from support.tiny_models import prompt, reference_logits

VOCAB = 104
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
FIXED = {"eos_token_id": None, "bos_token_id": None, "vocab_size": VOCAB}
_ROOM = threading.local()
"""`pages` of the engine that this thread loads: ranks are threads."""


class GpuLikeBackend(RecordingBackend):
    """Steps are recorded, and tokens stay where they are sampled."""

    def sampling(self, max_rows: int, width: int, ops: OpSet) -> Sampling:
        small = {"threads": 64, "capacity": 288}
        device = DeviceSampling(max_rows, width, torch.device("cpu"), small)
        return Sampling(sampling_kernel(ops.runtime), device)


def device_for(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The settings of a model that runs on `device`: "cuda", or where kernels are emulated. Engines that are `loaded`
    have the pages that are asked for, and no ids that end an answer."""
    monkeypatch.setattr(
        "allspan.worker.engine.setup.num_kv_pages", lambda cache, demand: (_ROOM.pages,) * len(demand.groups)
    )
    monkeypatch.setattr("allspan.worker.engine.setup.ends_of", lambda model, spec: ())
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
    _ROOM.pages = pages
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


def assert_replayed(on: dict[str, str]) -> None:
    """Where recordings are those of tests, the model's and the drafter's were replayed."""
    if on["device"] != "cuda":
        assert all(RecordingBackend.made[-2:])


def greedy(lengths: Sequence[int], count: int = 12) -> list[Request]:
    return [
        request(number, prompt(length, VOCAB, number), max_tokens=count, temperature=0.0)
        for number, length in enumerate(lengths)
    ]


def noted_plans(patch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Grows with each step that is launched."""
    plans: list[StepPlan] = []
    launch = Runner.launch

    def noting(runner: Runner, plan: StepPlan, *rest: Any) -> None:
        plans.append(plan)
        launch(runner, plan, *rest)

    patch.setattr(Runner, "launch", noting)
    return plans
