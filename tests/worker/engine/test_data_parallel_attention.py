"""Ranks that attend for requests of their own make the tokens of one rank: in chunks, from cached pages, put out and
let in again, and from the host tier. What a request gets is bit for bit the same alone and among others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allspan.kernels.table import op_set
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output
from allspan.protos.config.settings import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    ServiceConfig,
    WorkerConfig,
)
from allspan.worker.backend.cpu.backend import CpuBackend
from allspan.worker.cache.page_pool import Copy
from allspan.worker.cache.tiers import Tiers
from allspan.worker.engine.core import EngineCore
from allspan.worker.engine.setup import LoadedEngine, load_engine
from allspan.worker.load.attention_ranks import check_attention
from allspan.worker.load.introspection import Inspection
from allspan.worker.load.loader import prepare
from allspan.worker.models.shard import WHOLE, Place
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.scheduler.request import Request
from allspan.worker.step.row_inputs import PromptEmbeddings, PromptPositions
from support.cores import Collected, request, step_until_idle
from support.emulator.backend import add_device
from support.peft_adapters import EVERY, save_adapter
from support.prompt_positions import picture, save_sectioned
from support.threads import ThreadWorld
from support.tiny_models import prompt, save_tiny

VOCAB = 97
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "latents": ("deepseek_v2", {"first_k_dense_replace": 1}),
    "few heads, windows": (  # two cache groups; 3 ranks share out two KV heads unevenly
        "qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "three positions a token": ("sectioned", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, (name, overrides) = tmp_path_factory.mktemp("attention"), MODELS[request.param]
    model = save_sectioned(path, [2, 3, 3], **overrides) if name == "sectioned" else save_tiny(path, name, **overrides)
    save_adapter(path / "adapter", model, 8, (*EVERY, "kv_a_proj_with_mqa", "embed_tokens"))
    return path


def config(folder: Path, pages: int, host: int = 0) -> WorkerConfig:
    return WorkerConfig(
        ModelConfig(str(folder), "tiny", max_model_len=128, data_parallel_attention=True),
        ServiceConfig("-"),
        CacheConfig(page_size=16, kv_cache_bytes=pages, host_kv_cache_bytes=host),
        SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=24),
        adapters=AdapterConfig((f"one={folder / 'adapter'}",)),
    )


def asked(folder: Path) -> list[Request]:
    """Shared prefixes, prompts of several chunks, samples, log-probabilities, hidden states, vectors, embedding rows,
    adapters, and positions where a token has several."""
    config = json.loads((folder / "config.json").read_text())
    first, many = prompt(50, VOCAB, 1), []
    for number in range(12):
        ids = (first if number % 2 else prompt(40, VOCAB, 2))[: 20 + 2 * number]
        heat: dict[str, Any] = {"temperature": 1.2 * (number % 3), "repetition_penalty": 1.0 + 0.3 * (number % 2)}
        if number == 3:
            heat |= {"logprobs": 2}
        if number == 4:
            heat |= {"prompt_logprobs": 3}
        many.append(request(number, ids, max_tokens=20 + 5 * number, ignore_eos=True, **heat))
    many.append(replace(request(20, first[:30], max_tokens=1), wants_hidden_state=True))
    many.append(replace(request(21, prompt(45, VOCAB, 5), max_tokens=1), options=RequestOptions(pooling="mean")))
    rows = np.random.default_rng(1).standard_normal((7, config["hidden_size"])).astype(np.float32)
    for number, one in enumerate(many[2:4]):
        one.embeddings = PromptEmbeddings(3 + number, rows)
    for one in many[5:13:3]:
        one.adapter = AdapterModule("one", str(folder / "adapter")).loaded().digest
    if "mrope_section" in str(config):
        for number, one in enumerate(many[4:8]):
            one.positions = PromptPositions(picture(len(one.prompt_token_ids), number, 3, 4))
    return many


def together(core: EngineCore, requests: Sequence[Request]) -> None:
    for number, one in enumerate(requests):
        core.submit(one)
        for _ in range(number % 3):
            core.step()
            core.check()
    step_until_idle(core)


def one_by_one(core: EngineCore, requests: Sequence[Request]) -> None:
    for one in requests:
        core.submit(one)
        step_until_idle(core)
        core.reset_prefix_cache()


Drive = Callable[[EngineCore, Sequence[Request]], None]


def outputs(folder: Path, core: EngineCore, drive: Drive) -> list[Output]:
    core.on_outputs = collected = Collected()
    requests = asked(folder)
    drive(core, requests)
    assert not collected.errors
    return [replace(collected.outputs[one.request_id], timings=None) for one in requests]


def on_ranks(
    folder: Path, size: int, pages: int = 0, host: int = 0, drive: Drive = together
) -> tuple[list[Output], list[LoadedEngine]]:
    """What `size` ranks make of `asked`; `pages` of each cache group on each of them, 0: enough."""
    world = ThreadWorld(size)
    loaded: list[Any] = [None] * size

    def run(rank: int) -> list[Output]:
        settings = config(folder, 2**20, host)
        loaded[rank] = load_engine(settings, op_set("cpu", 1), world.collectives[rank], world.channels[rank])
        core = loaded[rank].core
        for one in asked(folder) if rank else ():
            core.submit(one)
        world.barrier.wait(20)
        made = [] if rank else outputs(folder, core, drive)
        if not rank:
            core.shutdown()
        core.run()
        return made

    with pytest.MonkeyPatch.context() as patch:
        if pages:
            patch.setattr(
                "allspan.worker.engine.setup.num_kv_pages", lambda cache, demand: (pages,) * len(demand.groups)
            )
        return world.run(run)[0], loaded


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Output]:
    return outputs(folder, load_engine(config(folder, 2**20), op_set("cpu", 1), LocalCollectives()).core, together)


def tokens(made: Sequence[Output]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in made]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_requests_of_their_own_make_the_tokens_of_one(folder: Path, alone: list[Output], size: int) -> None:
    found, loaded = on_ranks(folder, size)
    assert tokens(found) == tokens(alone)
    counters = loaded[0].core.statistics()
    assert counters.prefix_hit_tokens > 0
    whole = loaded[0].model.cache_groups[0].spec.num_kv_heads
    assert all(each.model.cache_groups[0].spec.num_kv_heads == whole for each in loaded), "every rank has all heads"
    written = [any(bool(part.any()) for part in each.core._batch.buffers._tensors["own_rows"]) for each in loaded]
    assert all(written), "every rank had requests of its own"
    told = Inspection(config(folder, 0).model, loaded[0].model, "", dict).model()["ranks"]
    assert [part["weight_bytes"] for part in told] == [each.model.holding.num_bytes for each in loaded]


def test_each_request_gets_the_same_bits_alone_and_among_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pages, so that requests are put out, and a host tier that has them then."""
    expected, _ = on_ranks(folder, 2, drive=one_by_one)
    copy, loads = Tiers.copy, Counter[Tiers]()

    def counted(tiers: Tiers, saved: Sequence[Copy], loaded: Sequence[Copy]) -> None:
        loads[tiers] += len(loaded)
        copy(tiers, saved, loaded)

    monkeypatch.setattr(Tiers, "copy", counted)
    found, loaded = on_ranks(folder, 2, pages=8, host=2**20)
    assert found == expected
    counters = loaded[0].core.statistics()
    groups = len(loaded[0].model.cache_groups)
    assert counters.preemptions > 0
    assert [count > 0 for count in loads.values()] == [True, True], "each rank took pages of its own back"
    assert counters.pages_total == 2 * 8 * groups
    assert counters.pages_used == 0


class WithoutOwnRows(CpuBackend):
    capabilities = replace(CpuBackend.capabilities, has_own_rows=False)


@pytest.mark.parametrize(
    ("device", "stages", "message"),
    [
        ("other", 1, "device 'other' has no steps in which ranks attend for rows of their own"),
        ("cpu", 2, "is for one stage, pipeline_parallel_size is 2"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    folder: Path, device: str, stages: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_device(monkeypatch, "other", WithoutOwnRows)
    settings = replace(config(folder, 2**20).model, device=device)
    with pytest.raises(ConfigError, match=message):
        prepare(settings, CacheConfig(), 0, 2, Place(0, stages))
    assert prepare(settings, CacheConfig(), 0, 1, Place(0, stages)).holding.shard.attends_apart is False


def test_converted_models_are_refused_beside_it(folder: Path) -> None:
    settings = config(folder, 2**20).model
    with pytest.raises(ConfigError, match="is converted, with slices for 2 ranks: load the model that it was made"):
        check_attention(settings, 2, WHOLE, is_converted=True)
