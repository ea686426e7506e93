"""A device is a folder and a row: an alarm for an engine that asks which device it runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allspan import Engine, SamplingParams
from support import toy_device
from support.emulator.backend import add_device
from support.tiny_models import save_tiny


def test_an_engine_on_a_device_from_outside_gives_the_tokens_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama2")
    params = [SamplingParams(max_tokens=6, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 0.9)]
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_bytes": 1 << 20, "page_size": 16}
    told = []
    toy_device.asked.clear()
    for here in ({"kernels": "reference"}, add_device(monkeypatch, "toy", toy_device.ToyBackend)):
        with Engine(tmp_path, **here, **settings) as engine:  # type: ignore[arg-type]
            outputs = engine.generate([[3, 1, 4, 1, 5], [9, 2, 6]], params)
        told.append([output.token_ids for output in outputs])
    assert told[0] == told[1]
    door = {"open_ops", "executor", "step_metadata", "step_inputs", "sampling", "page_store", "warm_up"}
    assert set(toy_device.asked) == door
