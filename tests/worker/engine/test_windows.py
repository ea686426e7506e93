"""Models whose layers keep unlike many tokens are served: two cache groups, of which one frees the pages behind its
window. Tokens are those of transformers, for prompts and outputs longer than the window."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan.kernels.table import op_set
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.worker.engine.core import EngineCore
from allspan.worker.engine.setup import LoadedEngine, load_engine
from allspan.worker.load.registry import find_model
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.scheduler.request import Request
from support.cores import Collected, request, step_until_idle
from support.threads import ThreadWorld
from support.tiny_models import prompt, reference_logits, save_tiny

WINDOW, PAGE = 20, 16
MIXED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "num_hidden_layers": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2: layers 2 and 3 slide": ("qwen2", MIXED),
    "qwen3: layers 0 and 2 slide": (
        "qwen3",
        MIXED | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "mistral: all layers slide": ("mistral", {"sliding_window": WINDOW}),
}


def assert_greedy(reference: Any, one: Request, tokens: list[int]) -> None:
    """Each token is transformers' best after those before it."""
    assert len(tokens) == one.params.max_tokens
    logits = reference_logits(reference, [*one.prompt_token_ids, *tokens])
    assert logits[len(one.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == tokens


def load(
    folder: Path, pages: tuple[int, ...], host: int = 0, world: ThreadWorld | None = None, rank: int = 0
) -> LoadedEngine:
    """An engine with so many pages of each cache group."""
    config = WorkerConfig(
        ModelConfig(str(folder), "tiny", max_model_len=160),
        ServiceConfig("-"),
        CacheConfig(page_size=PAGE, kv_cache_bytes=2**30, host_kv_cache_bytes=host),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24),
    )
    collectives = world.collectives[rank] if world else LocalCollectives()
    with pytest.MonkeyPatch.context() as patch:
        if pages:
            patch.setattr("allspan.worker.engine.setup.num_kv_pages", lambda cache, demand: pages)
        return load_engine(config, op_set("cpu", 1), collectives, world.channels[rank] if world else None)


def conversations(vocab: int) -> list[Request]:
    """Shared prefixes, prompts of several chunks, outputs longer than the window."""
    rng, families = random.Random(7), [prompt(40, vocab, seed) for seed in range(2)]
    asked = []
    for number in range(8):
        ids = families[number % 2][: rng.randint(17, 40)] + [rng.randrange(vocab) for _ in range(rng.randint(1, 5))]
        asked.append(request(number, ids, max_tokens=rng.randint(20, 60), ignore_eos=True))
    return asked


def used(core: EngineCore) -> list[int]:
    return [group.cache.device.num_used for group in core._planner.scheduler.memory.groups]


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("mixed")
    name, overrides = MODELS[request.param]
    return folder, save_tiny(folder, name, **overrides)


def tokens_of(core: EngineCore, asked: list[Request]) -> list[list[int]]:
    core.on_outputs = collected = Collected()
    for number, one in enumerate(asked):
        core.submit(one)
        for _ in range(number % 3):
            core.step()
            core.check()
    step_until_idle(core)
    assert not collected.errors
    return [collected.tokens(one) for one in asked]


@pytest.mark.parametrize("room", ["enough", "few pages of all tokens", "few pages of the window"])
def test_tokens_are_those_of_transformers(served: tuple[Path, Any], room: str) -> None:
    """Chunks, prefix hits and preemption."""
    folder, reference = served
    windows = {layer.attention.lifetime.window for layer in find_model(str(folder)).spec.layers}
    pages = {"enough": (), "few pages of all tokens": (12, 18), "few pages of the window": (12, 10)}[room]
    loaded = load(folder, pages if 0 in windows else pages[1:])
    assert [group.lifetime.window for group in loaded.model.cache_groups] == sorted(windows)
    asked = conversations(loaded.model.spec.vocab_size)
    for one, tokens in zip(asked, tokens_of(loaded.core, asked), strict=True):
        assert_greedy(reference, one, tokens)
    assert not any(used(loaded.core))
    counters = loaded.core.statistics()
    assert counters.prefix_hit_tokens > 0
    if 0 in windows:
        assert (counters.preemptions > 0) == (room == "few pages of all tokens")


def test_pages_of_both_groups_come_back_from_host_memory(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen2", **MIXED)
    core = load(tmp_path, (8, 6), host=2**20).core
    first, other = prompt(70, 97, 1), prompt(90, 97, 2)  # either fills nearly all pages
    asked = [request(i, ids, max_tokens=20, ignore_eos=True) for i, ids in enumerate((first, other, first))]
    for one in asked:
        assert_greedy(reference, one, tokens_of(core, [one])[0])
    assert core.statistics().prefix_host_hit_tokens == 48, "with the first of its 5 pages still on the device"


def test_two_ranks_make_the_same_tokens(tmp_path: Path) -> None:
    reference, world = save_tiny(tmp_path, "qwen2", **MIXED), ThreadWorld(2)

    def run(rank: int) -> list[list[int]]:
        core, asked = load(tmp_path, (), world=world, rank=rank).core, conversations(97)
        if rank:
            for one in asked:
                core.submit(one)
        world.barrier.wait(world.timeout)
        tokens = [] if rank else tokens_of(core, asked)
        if not rank:
            core.shutdown()
        core.run()
        return tokens

    for one, tokens in zip(conversations(97), world.run(run)[0], strict=True):
        assert_greedy(reference, one, tokens)


def test_pages_behind_the_window_are_free_while_the_request_runs(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", **MIXED)
    core = load(tmp_path, ()).core
    core.on_outputs = collected = Collected()
    core.submit(one := request(1, prompt(60, 97), max_tokens=60, ignore_eos=True))
    most = [0, 0]
    while core.step():
        core.check()
        most = [max(pair) for pair in zip(most, used(core), strict=True)]
    assert len(collected.tokens(one)) == 60
    assert most == [8, 4], "119 tokens fill 8 pages; a chunk of 24 and the 19 tokens before it lie in 4"


def test_what_lies_behind_the_window_is_not_read(tmp_path: Path) -> None:
    """Whatever is written to freed pages changes no token."""
    save_tiny(tmp_path, "qwen2", **MIXED)
    tokens = []
    for is_spoilt in (False, True):
        core = load(tmp_path, ()).core
        core.on_outputs = collected = Collected()
        core.submit(one := request(1, prompt(60, 97), max_tokens=60, ignore_eos=True))
        while core.step():
            if is_spoilt:
                _spoil(core)
        tokens.append(collected.tokens(one))
    assert tokens[0] == tokens[1]


def _spoil(core: EngineCore) -> None:
    """Fills the free pages of the window's group with NaN."""
    pool = core._planner.scheduler.memory.groups[1].cache.device
    held = {page for one in core._planner.scheduler.requests() if one.held for page in one.held[1].pages}
    model: Any = core._loop.runner._model
    executor = model._passes.plain.executor
    for layer in model.cache_groups[1].layers:
        for name in ("k_cache", "v_cache"):
            cache: torch.Tensor = executor._bound[executor._names[f"{name}.{layer}"]]
            cache[[page for page in range(pool.total) if page not in held]] = torch.nan
