"""States of all tokens that a model keeps for a draft head: those of transformers, on one to three ranks, and logits of
the same bits as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from allspan.kernels.table import op_set
from allspan.protos.api.errors import InternalError
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.cache.kv import KVCache
from allspan.worker.load.loader import load_model
from allspan.worker.models.model import Model
from support.threads import ThreadWorld
from support.tiny_models import prefill, prompt, relative_error, save_tiny, step_inputs

IDS = prompt(23, 97)


def load(path: Path, world: ThreadWorld, rank: int, backend: str = "reference") -> Model:
    settings = ModelConfig(str(path), "tiny")
    return load_model(settings, world.collectives[rank], op_set(backend), 32, 32, cache=CacheConfig(page_size=16))


@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("layers", [(1, 2, 3), (4,), (0, 4)])
def test_features_are_what_enters_the_layers_and_what_the_head_reads(
    name: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    reference = save_tiny(tmp_path, name, num_hidden_layers=4)
    with torch.no_grad():
        states = reference(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0].float() for layer in layers], dim=1)
    for size in (1, 2, 3):
        world = ThreadWorld(size)

        def run(rank: int, world: ThreadWorld = world) -> tuple[Tensor, Tensor]:
            model = load(tmp_path, world, rank)
            model.keep_features(layers)
            model.bind_cache(*(KVCache(group.spec, 2) for group in model.cache_groups))
            inputs = step_inputs([IDS], [0], [[1, 0]], 16)
            inputs.logits_rows = inputs.logits_rows[-1:]
            return model.forward(inputs).clone(), model.features(len(IDS)).clone()

        with torch.no_grad():
            wanted = reference(torch.tensor([IDS])).logits[0, -1:].float()
        logits, features = zip(*world.run(run), strict=True)
        assert relative_error(torch.cat(logits, dim=1), wanted) < 1e-4
        for found in features:
            assert relative_error(found, expected) < 1e-4, f"{size} ranks"


def test_logits_are_the_same_bits_with_and_without(tmp_path: Path) -> None:
    pytest.importorskip("allspan.kernels.cpu._native", reason="the compiled kernels promise it; they are not built")
    save_tiny(tmp_path, "deepseek_v2", num_hidden_layers=4)
    world = ThreadWorld(2)

    def run(rank: int) -> list[Tensor]:
        found = []
        for layers in ((), (1, 2), (4,)):
            model = load(tmp_path, world, rank, "cpu")
            if layers:
                model.keep_features(layers)
            found += prefill(model, [IDS], 9)
        return found

    for plain, *others in world.run(run):
        assert all(torch.equal(plain, each) for each in others)


def test_a_model_that_keeps_none_and_one_that_runs_already_say_so(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model = load(tmp_path, ThreadWorld(1), 0)
    with pytest.raises(InternalError, match="features of a model that does not keep them"):
        model.features(1)
    model.bind_cache(KVCache(model.cache_groups[0].spec, 1))
    with pytest.raises(InternalError, match="before adapters are added and the cache is bound"):
        model.keep_features((1,))
