"""Weights that are given back and read again: all ranks do it, or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from allspan.kernels.table import op_set
from allspan.protos.api.errors import CheckpointError
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.cache import kv as kv_cache
from allspan.worker.cache.kv import KVCache
from allspan.worker.engine import weights as weights_of_ranks
from allspan.worker.engine.engine import Engine
from allspan.worker.engine.weights import Weights
from allspan.worker.load.loader import load_model
from allspan.worker.models import holding
from allspan.worker.models.model import Model
from allspan.worker.process.release_memory import empty, give_back, resident_bytes, take_again
from allspan.worker.weights.held_tensor import HeldTensor
from allspan.worker.weights.tensor_folder import TensorFolder
from support.family_rows import FAMILIES, save_family, stacked
from support.threads import ThreadWorld
from support.tiny_gguf import save_gguf
from support.tiny_models import save_tiny

CACHE = CacheConfig(page_size=16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder, "qwen3")
    return folder


class Steps:
    """Of a GPU; says what was done with them."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def drain(self) -> None:
        self.done.append("drain")

    def capture(self) -> None:
        self.done.append("capture")

    def trim(self) -> None:
        self.done.append("trim")


class Ranks:
    """A world of which each rank has a copy of the checkpoint of its own."""

    def __init__(self, source: Path, folder: Path, size: int = 2, is_gpu: bool = False, **settings: Any) -> None:
        self.is_gpu, self.settings = is_gpu, settings
        self.steps = [Steps() for _ in range(size)]
        self.world = ThreadWorld(size)
        self.folders = [Path(shutil.copytree(source, folder / str(rank))) for rank in range(size)]
        self.models: list[Model] = []
        self.weights: list[Weights] = []
        for model, weights in self.world.run(self._load):
            self.models.append(model)
            self.weights.append(weights)
        self.first = self.copies()

    def copies(self) -> list[dict[str, torch.Tensor]]:
        return [{name: tensor.clone() for name, tensor in model.weights.items()} for model in self.models]

    def have_the_first_weights(self) -> bool:
        """On every rank, bit for bit."""
        pairs = zip(self.first, self.copies(), strict=True)
        return all(torch.equal(now[name], before[name]) for before, now in pairs for name in before)

    def reload(self) -> list[str]:
        """What each rank says of it; "" is success."""

        def call(rank: int) -> str:
            try:
                self.weights[rank].reload(lambda: None)
            except CheckpointError as error:
                return error.message
            return ""

        return self.world.run(call)

    def unload(self) -> None:
        self.world.run(lambda rank: self.weights[rank].unload())

    def _load(self, rank: int) -> tuple[Model, Weights]:
        config = ModelConfig(path=str(self.folders[rank]), name="tiny", **self.settings)
        collectives = self.world.collectives[rank]
        model = load_model(config, collectives, op_set("reference"), 16, 16, cache=CACHE)
        kv = KVCache(model.cache_groups[0].spec, 8)
        model.bind_cache(kv)
        pages = (*kv.keys, *kv.values)
        steps = self.steps[rank] if self.is_gpu else None
        return model, Weights(model, config, CACHE, collectives, pages, steps=steps)


@pytest.fixture
def ranks(tiny: Path, tmp_path: Path) -> Ranks:
    return Ranks(tiny, tmp_path)


def are_loaded(ranks: Ranks) -> Sequence[bool]:
    return [weights.is_loaded for weights in ranks.weights]


def test_what_is_read_again_lies_where_it_lay_and_is_the_same(ranks: Ranks) -> None:
    places = [tensor.data_ptr() for model in ranks.models for tensor in model.weights.values()]
    ranks.unload()
    assert are_loaded(ranks) == [False, False]
    assert not ranks.have_the_first_weights(), "nothing was given back: the test is void"
    assert ranks.reload() == ["", ""]
    assert are_loaded(ranks) == [True, True]
    assert ranks.have_the_first_weights()
    assert [tensor.data_ptr() for model in ranks.models for tensor in model.weights.values()] == places


def test_blocks_of_a_gguf_file_are_read_again_and_those_of_other_types_are_refused(tmp_path: Path) -> None:
    for kind in (Type.Q8_0, Type.Q4_1):
        (tmp_path / kind.name).mkdir()
        sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96}
        model = save_tiny(tmp_path / "tiny", "qwen3", **sizes)
        save_gguf(tmp_path / kind.name / "model.gguf", model, kind)
    ranks = Ranks(tmp_path / "Q8_0", tmp_path / "ranks")
    ranks.unload()
    assert not ranks.have_the_first_weights(), "nothing was given back: the test is void"
    assert ranks.reload() == ["", ""]
    assert ranks.have_the_first_weights()
    file = ranks.folders[1] / "model.gguf"
    file.unlink()
    shutil.copy(tmp_path / "Q4_1" / "model.gguf", file)
    said = ranks.reload()
    assert said[0] == said[1]
    assert "its tensors are of other types" in said[0]
    assert ranks.have_the_first_weights()


def test_experts_placed_by_a_file_are_read_again_without_it(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny", "qwen2_moe")
    loads, count = tmp_path / "loads.json", json.loads((tmp_path / "tiny" / "config.json").read_text())["num_experts"]
    tokens = [{"layer": layer, "tokens": [(expert * 5) % count for expert in range(count)]} for layer in range(2)]
    loads.write_text(json.dumps(tokens))
    ranks = Ranks(tmp_path / "tiny", tmp_path / "ranks", enable_expert_parallel=True, expert_load=str(loads))
    assert ranks.models[0].holding.placements[0].groups[0] != tuple(range(count // 2))
    loads.unlink()
    ranks.unload()
    assert not ranks.have_the_first_weights(), "nothing was given back: the test is void"
    assert ranks.reload() == ["", ""]
    assert ranks.have_the_first_weights()
    assert ranks.weights[1].checkpoint().checkpoint.names()


@pytest.mark.parametrize("unloaded", [False, True])
def test_a_rank_that_cannot_open_its_files_keeps_all_from_reading(ranks: Ranks, unloaded: bool) -> None:
    file = ranks.folders[1] / "model.safetensors"
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[:-100])
    if unloaded:
        ranks.unload()
    said = ranks.reload()
    assert said[0] == said[1]
    assert f"rank 1: {file}: truncated" in said[0]
    assert are_loaded(ranks) == [not unloaded] * 2
    assert ranks.have_the_first_weights() is not unloaded
    file.write_bytes(whole)
    assert ranks.reload() == ["", ""]
    assert ranks.have_the_first_weights()


def test_a_rank_whose_reading_breaks_off_leaves_all_unloaded(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    read = TensorFolder.read

    def break_off(self: TensorFolder, name: str, *arguments: object) -> None:
        if self.where(name).parent == ranks.folders[1] and name.startswith("model.norm"):
            raise OSError(5, "Input/output error", str(self.where(name)))
        read(self, name, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(TensorFolder, "read", break_off)
        said = ranks.reload()
    assert said[0] == said[1]
    assert "rank 1: " in said[0]
    assert "Input/output error" in said[0]
    assert are_loaded(ranks) == [False, False]
    assert ranks.reload() == ["", ""]
    assert ranks.have_the_first_weights()


def test_a_gpu_s_memory_is_freed_once_no_step_runs_and_steps_are_captured_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, with storages as a GPU's tensors have them."""

    def memory(declared: Mapping[str, HeldTensor]) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in declared.items()}

    monkeypatch.setattr(holding, "host_zeros", memory)
    monkeypatch.setattr(kv_cache, "anonymous", lambda size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(weights_of_ranks, "give_back", empty)
    ranks = Ranks(tiny, tmp_path, is_gpu=True)
    tensors = [tensor for model in ranks.models for tensor in (*model.weights.values(), *model.buffers)]
    tensors += [page for weights in ranks.weights for page in weights._pages]
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    ranks.unload()
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0
    assert [steps.done for steps in ranks.steps] == [["drain", "trim"]] * 2
    assert ranks.reload() == ["", ""]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes
    assert ranks.have_the_first_weights()
    assert not any(page.any() for weights in ranks.weights for page in weights._pages)
    assert [steps.done for steps in ranks.steps] == [["drain", "trim", "drain", "capture"]] * 2


def test_views_of_what_is_freed_have_its_memory_again() -> None:
    tensor = torch.ones(6, 4)
    inner, other = tensor[1:5, 2], torch.ones(3)
    with_end = tensor[2:]
    empty([inner])
    take_again([inner, with_end, other])
    assert tensor.untyped_storage().nbytes() == 6 * 4 * 4
    tensor.fill_(2.0)
    assert inner.tolist() == [2.0] * 4
    assert other.tolist() == [1.0] * 3


def test_memory_that_is_given_back_is_gone_until_it_is_written() -> None:
    tensor = torch.ones(8 << 20)
    half = tensor[: 4 << 20]
    held = resident_bytes()
    give_back([tensor, half])
    assert held - resident_bytes() > 30e6
    assert float(tensor[4096:-4096].abs().sum()) == 0.0
    tensor.fill_(2.0)
    assert float(half.sum()) == 2.0 * half.numel()


def test_a_folder_may_spell_its_experts_otherwise_when_it_is_read_again(tmp_path: Path) -> None:
    save_family(tmp_path, FAMILIES["qwen3_moe"])
    file = tmp_path / "model.safetensors"
    asked = {"prompts": [[1, 2, 3]], "sampling_params": SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)}
    with Engine(tmp_path, dtype="float32", kv_cache_bytes=1 << 22, max_model_len=64) as engine:
        engine.start_model()
        before = engine.generate(**asked)
        engine.stop_model()
        engine.unload_weights()
        save_file(stacked(load_file(file)), file, {"format": "pt"})
        engine.reload_weights()
        engine.start_model()
        assert engine.generate(**asked)[0].token_ids == before[0].token_ids
