"""Adapters come and go while requests run, in one process: tokens are those of merged weights, and nothing is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from allspan import Engine, SamplingParams
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import (
    AdapterInUse,
    AdapterLoaded,
    AdapterNotFound,
    AdapterRank,
    AllspanError,
    InvalidRequest,
    PermissionDenied,
    TooManyAdapters,
)
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import ResultQueue
from allspan.worker.process.host import rss_bytes
from allspan.worker.scheduler.plan import Operation
from support.peft_adapters import greedy_tokens, merged, save_adapter
from support.tiny_models import prompt, save_tiny
from support.waiting import wait_until

PROMPT = prompt(40, 97)
COUNT = 12
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
NAMES = ("one", "two", "three")


class Adapted:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = save_tiny(folder / "base", "qwen2", max_position_embeddings=1024)
        self.expected = {"": greedy_tokens(model, PROMPT, COUNT)}
        for seed, name in enumerate(NAMES):
            deltas = save_adapter(folder / name, model, 4 + 4 * seed, seed=seed, r=4 + 4 * seed)
            self.expected[name] = greedy_tokens(merged(model, deltas), PROMPT, COUNT)

    def engine(self, **settings: Any) -> Engine:
        return Engine(self.folder / "base", max_model_len=1024, threads=1, page_size=16, **settings)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def ask(engine: Engine, name: str, adapted: Adapted) -> None:
    (done,) = engine.generate([PROMPT], GREEDY, RequestOptions(adapter=name))
    assert done.token_ids == adapted.expected[name], name


def running(engine: Engine, name: str) -> tuple[tuple[int, ...], ResultQueue]:
    """A request's first tokens, and where its others come."""
    _, queue = engine.start_request(PROMPT, LONG, options=RequestOptions(adapter=name))
    return next(iter(queue)).token_ids, queue


def test_an_adapter_is_there_from_the_call_that_loads_it_to_the_one_that_unloads_it(adapted: Adapted) -> None:
    with adapted.engine(enable_lora=True) as engine:
        assert engine.list_loras() == ()
        for name in NAMES:
            with pytest.raises(AdapterNotFound, match=f"'{name}', which is not served here"):
                ask(engine, name, adapted)
            engine.load_lora(name, adapted.folder / name)
            ask(engine, name, adapted)
        assert [each.name for each in engine.list_loras()] == list(NAMES)
        assert engine.unload_lora("two") == 0
        with pytest.raises(AdapterNotFound, match="the adapters are 'one', 'three'"):
            ask(engine, "two", adapted)
        for name in ("", "one", "three"):
            ask(engine, name, adapted)


def test_more_adapters_than_slots_take_turns(adapted: Adapted) -> None:
    modules = tuple(f"{name}={adapted.folder / name}" for name in NAMES[:2])
    with adapted.engine(lora_modules=modules, max_loras=1, max_cpu_loras=3) as engine:
        engine.load_lora("three", adapted.folder / "three")
        opened = [
            (name, engine.start_request(PROMPT, GREEDY, options=RequestOptions(adapter=name)))
            for name in ("one", "two", "", "three", "one", "three")
        ]
        for name, (_, queue) in opened:
            assert tuple(token for output in queue for token in output.token_ids) == adapted.expected[name], name


def test_requests_that_have_an_unloaded_adapter_finish_and_new_ones_are_refused(adapted: Adapted) -> None:
    with adapted.engine(max_loras=1) as engine:
        engine.load_lora("one", adapted.folder / "one")
        first, queue = running(engine, "one")
        assert engine.unload_lora("one") == 1
        assert engine.list_loras() == ()
        with pytest.raises(AdapterNotFound):
            ask(engine, "one", adapted)
        with pytest.raises(AdapterInUse, match="1 that were unloaded still have requests, at most 1"):
            engine.load_lora("two", adapted.folder / "two")
        tokens = first + tuple(token for output in queue for token in output.token_ids)
        assert (len(tokens), tokens[:COUNT]) == (LONG.max_tokens, adapted.expected["one"])

        def loaded() -> bool:
            try:
                engine.load_lora("two", adapted.folder / "two")
            except AdapterInUse:
                return False
            return True

        wait_until(loaded, what="the place of the adapter")
        ask(engine, "two", adapted)


def test_an_adapter_loaded_again_under_its_name_shares_no_page_with_the_one_before(adapted: Adapted) -> None:
    with adapted.engine(enable_lora=True) as engine:
        for name in ("one", "two"):  # other weights under one name
            engine.load_lora("sql", adapted.folder / name)
            for _ in range(2):
                (done,) = engine.generate([PROMPT], GREEDY, RequestOptions(adapter="sql"))
                assert done.token_ids == adapted.expected[name]
            engine.unload_lora("sql")
        assert engine.statistics().prefix_hit_tokens == 2 * 32


@pytest.fixture(scope="module")
def limited(adapted: Adapted) -> Iterator[Engine]:
    folder = adapted.folder / "allowed"
    shutil.copytree(adapted.folder / "one", folder / "one")
    (folder / "way out").symlink_to(adapted.folder / "two")
    (folder / "way in").symlink_to(folder / "one")
    (folder / "mixed").mkdir()
    (folder / "mixed/adapter_config.json").symlink_to(folder / "one/adapter_config.json")
    (folder / "mixed/adapter_model.safetensors").symlink_to(adapted.folder / "one/adapter_model.safetensors")
    (folder / "broken").mkdir()
    shutil.copy(adapted.folder / "one/adapter_config.json", folder / "broken")
    save_file({}, folder / "broken/adapter_model.safetensors")
    with adapted.engine(lora_dir=str(folder), max_lora_rank=8, max_loras=2) as engine:
        yield engine


@pytest.mark.parametrize(
    ("name", "path", "error", "words"),
    [
        ("a", "/etc", PermissionDenied, "lies outside of --lora-dir"),
        ("a", "..", PermissionDenied, "lies outside of --lora-dir"),
        ("a", ".", PermissionDenied, "lies outside of --lora-dir"),
        ("a", "one/../../two", PermissionDenied, "lies outside of --lora-dir"),
        ("a", "way out", PermissionDenied, "lies outside of --lora-dir"),
        ("a", "mixed", PermissionDenied, "'adapter_model.safetensors' lies outside"),
        ("a", "nothing", InvalidRequest, "the adapter 'a' cannot be loaded: .*adapter_model.safetensors is missing"),
        ("a", "broken", InvalidRequest, "there are no tensors"),
        ("a", "x" * 5000, InvalidRequest, "lora_path has 5000 characters, must have at most 4096"),
        ("a", "one\0", InvalidRequest, "none of them NUL"),
        ("a", "~one\0", InvalidRequest, "none of them NUL"),
        ("a", os.fsdecode(b"one\xff"), InvalidRequest, "lora_path is 'one.udcff', which is not UTF-8 at character 3"),
        ("a", "~nobody-of-this-name/one", InvalidRequest, "is missing"),
        ("a b", "one", InvalidRequest, "a name must have letters"),
        ("BASE", "one", InvalidRequest, "'BASE', which is the model's own name"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_takes_no_place(
    limited: Engine, adapted: Adapted, name: str, path: str, error: type[AllspanError], words: str
) -> None:
    with pytest.raises(error, match=words):
        limited.load_lora(name, path)
    for each in ("one", "way in"):
        limited.load_lora(each.replace(" ", "-"), each)
    ask(limited, "one", adapted)
    for each in limited.list_loras():
        limited.unload_lora(each.name)


def test_a_name_that_is_taken_a_rank_that_is_too_high_and_one_too_many_are_refused(
    limited: Engine, adapted: Adapted
) -> None:
    shutil.copytree(adapted.folder / "three", adapted.folder / "allowed/three", dirs_exist_ok=True)
    with pytest.raises(AdapterRank, match="has rank 12, max_lora_rank is 8"):
        limited.load_lora("three", "three")
    limited.load_lora("one", "one")
    with pytest.raises(AdapterLoaded, match="'one' is loaded"):
        limited.load_lora("ONE", "one")
    limited.load_lora("other", "one")
    with pytest.raises(TooManyAdapters, match="2 adapters are loaded, at most 2"):
        limited.load_lora("more", "one")
    for name in ("one", "other"):
        limited.unload_lora(name)


def test_an_unloaded_load_is_not_taken_in_again(adapted: Adapted) -> None:
    module = AdapterModule("one", str(adapted.folder / "one")).loaded(b"a client that was away has this load")
    with adapted.engine(max_loras=2) as engine:
        adapters = engine._core.adapters
        adapters.load(module, 10)
        _, queue = running(engine, "one")
        assert engine.unload_lora("one") == 1
        with pytest.raises(AdapterNotFound, match="this load of the adapter 'one' was unloaded: load it anew"):
            adapters.load(module, 10)
        list(queue)
        wait_until(lambda: engine.statistics().adapters_loaded == 0, what="the place of the adapter")
        with pytest.raises(AdapterNotFound, match="load it anew"):  # cached pages have its digest
            adapters.load(module, 10)
        engine._core.check()
        engine.load_lora("one", module.path)
        ask(engine, "one", adapted)


@pytest.mark.parametrize("digest", [0, 1 << 48])
def test_a_digest_that_keys_of_pages_cannot_have_is_refused(limited: Engine, digest: int) -> None:
    with pytest.raises(InvalidRequest, match=f"digest is {digest}, must have 48 bits"):
        limited._core.adapters.load(AdapterModule("a", "one", digest=digest), 10)


def test_an_adapter_that_is_unloaded_as_soon_as_it_is_there_was_loaded(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with adapted.engine(enable_lora=True) as engine:
        operate = engine._core.operate

        def then_unload(operation: Operation, timeout: float, argument: bytes = b"") -> None:
            operate(operation, timeout, argument)
            if operation is Operation.ADD_ADAPTER and engine.list_loras():
                assert engine.unload_lora("one") == 0

        monkeypatch.setattr(engine._core.adapters, "_operate", then_unload)
        engine.load_lora("one", adapted.folder / "one")
        assert engine.list_loras() == ()
        assert engine.statistics().adapters_loaded == 0


def test_an_engine_without_room_for_adapters_says_how_to_make_some(adapted: Adapted) -> None:
    with adapted.engine() as engine:
        with pytest.raises(InvalidRequest, match="start with --enable-lora"):
            engine.load_lora("one", adapted.folder / "one")
        ask(engine, "", adapted)


@pytest.mark.parametrize("cycles", [25, pytest.param(1000, marks=pytest.mark.nightly)])
def test_loading_and_unloading_under_load_leaks_nothing(adapted: Adapted, cycles: int) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), rss_bytes()

    with adapted.engine(max_loras=2, max_cpu_loras=3) as engine:
        queue, before = running(engine, "")[1], held()
        for cycle in range(cycles):
            engine.load_lora("one", adapted.folder / "one")
            ask(engine, "one", adapted)
            engine.unload_lora("one")
            if queue.state.is_final:
                queue = running(engine, "")[1]
            if cycle == 5:
                before = held()
        after = held()
        assert after[0] <= before[0]
        assert after[1] - before[1] < 32 * 2**20  # 1,000 folders of 0.1 MB, and the slots of three, are more
        list(queue)
        wait_until(lambda: engine.statistics().pages_used == 0, what="free pages")
        assert engine.statistics().adapters_loaded == 0
        engine._core.check()
