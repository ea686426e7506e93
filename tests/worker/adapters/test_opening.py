"""Adapters that are named at the start: ranks go on where all of them have read the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan.kernels.table import op_set
from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import AdapterConfig, CacheConfig, ModelConfig
from allspan.worker.adapters.opening import open_adapters
from allspan.worker.adapters.registry import AdapterRegistry
from allspan.worker.load.loader import load_model
from allspan.worker.step.side_copies import HostCopies
from support.peft_adapters import save_adapter
from support.threads import ThreadWorld
from support.tiny_models import save_tiny


def test_ranks_that_find_different_adapters_under_one_name_do_not_start(tmp_path: Path) -> None:
    """The files of two hosts."""
    base = save_tiny(tmp_path / "base", "qwen2")
    for seed in range(2):
        save_adapter(tmp_path / str(seed), base, 8, seed=seed)
    world, model = ThreadWorld(2), ModelConfig(path=str(tmp_path / "base"), name="tiny")

    def opened(rank: int, folder: int) -> AdapterRegistry | None:
        config = AdapterConfig(lora_modules=("plain=" + str(tmp_path / "0"), "sql=" + str(tmp_path / str(folder))))
        loaded = load_model(model, world.collectives[rank], op_set("reference"), 8, 8, cache=CacheConfig(page_size=16))
        wait = world.collectives[rank].barrier
        return open_adapters(loaded, config, "cpu", world.collectives[rank], loaded.holding.packer, HostCopies(), wait)

    for registry in world.run(lambda rank: opened(rank, 1)):
        assert [each.name for each in registry.modules.values()] == ["plain", "sql"]
    told: list[str] = []

    def refused(rank: int) -> None:
        with pytest.raises(ConfigError) as error:
            opened(rank, rank)
        told.append(str(error.value))

    world.run(refused)
    assert len(told) == 2
    for each in told:
        assert "the adapter 'sql' cannot be loaded: rank 1 read other matrices than rank 0" in each
