"""Requests with adapters on the CUDA kernels: the likelihoods of merged weights, beside rows with the base's bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan.protos.api.adapters import find_adapter
from allspan.protos.api.results import Output
from allspan.protos.config.settings import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    ServiceConfig,
    WorkerConfig,
)
from allspan.worker.engine.setup import LoadedEngine, load_engine
from allspan.worker.load.loader import open_ops
from support.cores import Collected, request
from support.peft_adapters import merged, save_adapter
from support.threads import ThreadWorld
from support.tiny_models import prompt, reference_logits, save_tiny

SIZES = {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1}
RANKED = {"head_dim": 64, "hidden_size": 144, "num_attention_heads": 6, "num_key_value_heads": 2}
ASKED = [prompt(70, 97), prompt(5, 97, 1), prompt(5, 97, 2)]
"""The first in two chunks."""
NAMES = ("", "one", "two")
COUNT = 12


class Adapted:
    """A model with two adapters of different ranks, and what transformers makes of each."""

    def __init__(self, folder: Path, name: str = "qwen2", sizes: dict[str, int] = SIZES) -> None:
        self.folder, base = folder, save_tiny(folder / "base", name, torch.bfloat16, **sizes).float()
        one = save_adapter(folder / "one", base, 8, r=8, seed=1)
        two = save_adapter(folder / "two", base, 16, ("q_proj", "v_proj", "gate_proj", "o_proj"), r=16, seed=2)
        self.models = {"": base, "one": merged(base, one), "two": merged(base, two)}

    def config(self, device: str, has_adapters: bool = True, **model: Any) -> WorkerConfig:
        modules = tuple(f"{name}={self.folder / name}" for name in NAMES[1:]) if has_adapters else ()
        return WorkerConfig(
            ModelConfig(str(self.folder / "base"), "tiny", max_model_len=128, dtype="bfloat16", device=device, **model),
            ServiceConfig("-"),
            CacheConfig(page_size=16, kv_cache_bytes=2**22, enable_prefix_caching=False),
            SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64),
            adapters=AdapterConfig(modules),
        )

    def load(self, device: str, has_adapters: bool = True, **model: Any) -> LoadedEngine:
        settings = self.config(device, has_adapters, **model)
        return load_engine(settings, open_ops(settings), ThreadWorld(1).collectives[0])

    def miss(self, name: str, ids: list[int], output: Output) -> float:
        """By how much the tokens' logarithms are off in the median."""
        whole = [*ids, *output.token_ids]
        likely = reference_logits(self.models[name], whole).log_softmax(1)
        told = torch.tensor([entry.logprob for entry in output.logprobs])
        return float((told - likely[range(len(ids) - 1, len(whole) - 1), output.token_ids]).abs().median())


def answers(loaded: LoadedEngine, names: Sequence[str], first: int = 0, is_leader: bool = True) -> list[Output]:
    """Of all prompts side by side, each with the adapter of that name."""
    core, requests = loaded.core, []
    for number, (ids, name) in enumerate(zip(ASKED, names, strict=True), first):
        one = request(number, ids, max_tokens=COUNT, ignore_eos=True, logprobs=0)
        one.adapter = find_adapter(name, core.adapters.listed()[1])
        requests.append(one)
        core.submit(one)
    if not is_leader:
        return []
    core.on_outputs = collected = Collected()
    while core.step():
        core.check()
    assert not collected.errors
    return [collected.outputs[one.request_id] for one in requests]


@pytest.fixture
def adapted(tmp_path: Path) -> Adapted:
    return Adapted(tmp_path)


def test_rows_take_the_adapter_of_their_request_whatever_ran_before(adapted: Adapted, on: dict[str, Any]) -> None:
    loaded = adapted.load(**on)
    for turn, names in enumerate((("one", "", "two"), ("two", "one", ""), ("", "", ""), ("one", "one", "one"))):
        for name, ids, output in zip(names, ASKED, answers(loaded, names, 3 * turn), strict=True):
            assert adapted.miss(name, ids, output) < 0.05, names
            others = [adapted.miss(other, ids, output) for other in NAMES if other != name]
            assert min(others) > 0.1, names


def test_an_adapter_of_the_embedding_and_the_head_changes_its_requests_alone(
    adapted: Adapted, on: dict[str, Any]
) -> None:
    deltas = save_adapter(adapted.folder / "one", adapted.models[""], 8, ("embed_tokens", "lm_head"), r=8, seed=1)
    adapted.models["one"], names = merged(adapted.models[""], deltas), ("one", "", "one")
    for name, ids, output in zip(names, ASKED, answers(adapted.load(**on), names), strict=True):
        assert adapted.miss(name, ids, output) < 0.05
        assert adapted.miss("one" if not name else "", ids, output) > 0.1


@pytest.mark.parametrize("quantization", ["none", "uint4"])
def test_rows_without_an_adapter_have_the_bits_of_a_model_without_any(
    quantization: str, adapted: Adapted, on: dict[str, Any]
) -> None:
    config = {"quantization": quantization, **on}
    expected, loaded = answers(adapted.load(has_adapters=False, **config), ("", "", "")), adapted.load(**config)
    for turn, names in enumerate((("one", "", "two"), ("", "two", ""))):
        for name, output, base in zip(names, answers(loaded, names, 3 * turn), expected, strict=True):
            assert (output.logprobs == base.logprobs) is (name == "")


def test_adapters_change_quantised_layers_as_they_do_others(adapted: Adapted, on: dict[str, Any]) -> None:
    loaded = adapted.load(quantization="int8", **on)
    for name, ids, output in zip(NAMES, ASKED, answers(loaded, NAMES), strict=True):
        assert adapted.miss(name, ids, output) < 0.1
        assert min(adapted.miss(other, ids, output) for other in NAMES if other != name) > 0.1


def test_ranks_hold_their_parts_of_adapters(tmp_path: Path, on: dict[str, Any]) -> None:
    if on["device"] == "cuda":
        pytest.skip("gpu: ranks are processes there")
    adapted, world, names = Adapted(tmp_path, "llama", RANKED), ThreadWorld(2), ("one", "", "two")
    settings = adapted.config(**on)  # host collectives sum within a step: no other may be in flight
    settings = replace(settings, scheduler=replace(settings.scheduler, async_scheduling=False))

    def run(rank: int) -> list[Output]:
        loaded = load_engine(settings, open_ops(settings), world.collectives[rank], world.channels[rank])
        if rank == 0:
            world.collectives[rank].barrier()
            found = answers(loaded, names)
            loaded.core.shutdown()
        else:
            found = answers(loaded, names, is_leader=False)
            world.collectives[rank].barrier()
        loaded.core.run()
        return found

    for name, ids, output in zip(names, ASKED, world.run(run)[0], strict=True):
        assert adapted.miss(name, ids, output) < 0.03
