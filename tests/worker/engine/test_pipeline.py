"""Stages of a pipeline make the tokens of one rank, bit for bit, with several batches in flight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allspan.kernels.table import op_set
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.options import RequestOptions
from allspan.protos.config.settings import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServiceConfig,
    WorkerConfig,
)
from allspan.worker.cache.budget import Room
from allspan.worker.engine.core import EngineCore
from allspan.worker.engine.setup import LoadedEngine, load_engine
from allspan.worker.load.loader import prepare
from allspan.worker.models.shard import Place
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.scheduler.request import Request
from allspan.worker.tools.memory_plan import plan_memory
from support.cores import Collected, request
from support.peft_adapters import EVERY, save_adapter
from support.thread_pipes import ThreadPipeline
from support.tiny_models import prompt, save_tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5},  # nine heads, a head of its own
    "qwen2": {  # the head is the embedding; two kinds of layers in each stage
        "num_hidden_layers": 6,
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    model = save_tiny(path, request.param, **FAMILIES[request.param])
    save_adapter(path / "adapter", model, 8, (*EVERY, "embed_tokens", "lm_head"))
    return path


def config(folder: Path, stages: int, host: int = 0, kv: int = 2**20) -> WorkerConfig:
    return WorkerConfig(
        ModelConfig(str(folder), "tiny", max_model_len=128),
        ServiceConfig("-"),
        CacheConfig(page_size=16, kv_cache_bytes=kv, host_kv_cache_bytes=host),
        SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24),
        ParallelConfig(pipeline_parallel_size=stages),
        adapters=AdapterConfig((f"one={folder / 'adapter'}",)),
    )


def asked(core: EngineCore, vocab: int = 97) -> list[Request]:
    """Shared prefixes, prompts of several chunks, samples, log-probabilities, hidden states and vectors; some with an
    adapter."""
    first, many = prompt(50, vocab, 1), []
    for number in range(8):
        ids = (first if number % 2 else prompt(40, vocab, 2))[: 20 + 3 * number]
        heat: dict[str, Any] = {"temperature": 1.2 * (number % 3), "repetition_penalty": 1.0 + 0.3 * (number % 2)}
        if number == 3:
            heat |= {"logprobs": 2}
        if number == 4:
            heat |= {"prompt_logprobs": 3}
        many.append(request(number, ids, max_tokens=20 + 4 * number, ignore_eos=True, **heat))
    many.append(replace(request(20, first[:30], max_tokens=1), wants_hidden_state=True))
    many += [
        replace(request(21 + i, prompt(45, vocab, 5), max_tokens=1), options=RequestOptions(pooling=pooling))
        for i, pooling in enumerate(("mean", "last", "cls"))
    ]
    for one in many[1::3]:
        one.adapter = core.adapters.listed()[1][0].digest
    return many


def outputs(loaded: LoadedEngine) -> list[Any]:
    """What the leader makes of `asked`."""
    core = loaded.core
    core.on_outputs = collected = Collected()
    requests = asked(core)
    for one in requests:
        core.submit(one)
    while core.step():
        core.check()
    assert not collected.errors
    return [replace(collected.outputs[one.request_id], timings=None) for one in requests]


def in_stages(settings: WorkerConfig, stages: int, width: int = 1) -> tuple[list[Any], ThreadPipeline, list[Any]]:
    world = ThreadPipeline(stages, width)
    loaded: list[Any] = [None] * (stages * width)

    def run(rank: int) -> list[Any]:
        loaded[rank] = load_engine(settings, op_set("cpu", 1), world.collectives(rank), world.channels[rank])
        core = loaded[rank].core
        if rank:
            for one in asked(core):
                core.submit(one)
        world.world.barrier.wait(20)
        made = [] if rank else outputs(loaded[0])
        if not rank:
            core.shutdown()
        core.run()
        return made

    return world.world.run(run)[0], world, loaded


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[LoadedEngine, list[Any]]:
    loaded = load_engine(config(folder, 1), op_set("cpu", 1), LocalCollectives())
    return loaded, outputs(loaded)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_make_what_one_rank_makes_bit_for_bit(
    folder: Path, alone: tuple[LoadedEngine, list[Any]], stages: int
) -> None:
    whole, expected = alone
    found, world, loaded = in_stages(config(folder, stages), stages)
    assert found == expected
    assert world.pipes[0].most_ahead > 1, "the first stage went on while the second had not begun"
    layers = [layer for each in loaded for group in each.model.cache_groups for layer in group.layers]
    assert sorted(layers) == list(range(len(whole.model.spec.layers)))
    embedding = sum(tensor.nbytes for name, tensor in whole.model.weights.items() if name.startswith("embedding"))
    twice = embedding if whole.model.spec.tie_word_embeddings else 0
    assert sum(each.model.weight_bytes for each in loaded) == whole.model.weight_bytes + twice
    assert loaded[0].core.statistics().prefix_hit_tokens > 0


def test_a_pipeline_of_two_ranks_a_stage_makes_the_same_tokens(
    folder: Path, alone: tuple[LoadedEngine, list[Any]]
) -> None:
    found, _, _ = in_stages(config(folder, 2), 2, width=2)
    assert [one.token_ids for one in found] == [one.token_ids for one in alone[1]]


def test_preempted_requests_and_pages_of_the_host_change_no_token(
    folder: Path, alone: tuple[LoadedEngine, list[Any]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        groups = len(alone[0].model.cache_groups)
        patch.setattr("allspan.worker.engine.setup.num_kv_pages", lambda cache, demand: (9,) * groups)
        found, _, loaded = in_stages(config(folder, 2, host=2**20), 2)
    assert found == alone[1]
    assert loaded[0].core.statistics().preemptions > 0


def test_a_pipeline_of_one_process_or_of_too_many_stages_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2, but this process"):
        load_engine(config(folder, 2), op_set("cpu", 1), LocalCollectives())
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 7.*no layer"):
        prepare(config(folder, 7).model, CacheConfig(), 0, 1, Place(0, 7))


def test_a_plan_says_what_each_stage_holds(folder: Path, alone: tuple[LoadedEngine, list[Any]]) -> None:
    whole = alone[0].model
    count = len(whole.spec.layers)
    plan = plan_memory(config(folder, 2), 2, Room(0), 2)
    assert [rank.layers for rank in plan.ranks] == [(0, -(-count // 2)), (-(-count // 2), count)]
    page = sum(group.spec.bytes_per_page for group in whole.cache_groups)
    assert sum(rank.kv_bytes_per_page for rank in plan.ranks) == page
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2, which does not divide 3 ranks"):
        plan_memory(config(folder, 2), 3, Room(0), 3)
