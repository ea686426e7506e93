"""Weights and KV pages that are given back to the GPU, and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from allspan import Engine, SamplingParams
from allspan.kernels.cuda.jit import modules
from allspan.worker.backend.cuda import step_layout
from support.emulator.backend import add_device
from support.emulator.driver import EmulatorDriver
from support.latent_models import save_latent
from support.tiny_models import prompt, save_tiny

SIZES = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 16,
}
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture
def on(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of an engine on the CUDA kernels."""
    if device == "cuda":
        return {"device": "cuda", "kv_cache_bytes": 256 << 20}
    return {**add_device(monkeypatch), "kv_cache_bytes": 4 << 20}


@pytest.mark.parametrize(
    ("quantization", "is_eager"),
    [
        ("int8", False),
        pytest.param("none", False, marks=pytest.mark.gpu),
        pytest.param("uint4", True, marks=pytest.mark.gpu),
    ],
)
def test_weights_that_are_read_again_give_the_same_tokens_and_their_memory_was_free(
    quantization: str, is_eager: bool, tmp_path: Path, on: dict[str, Any]
) -> None:
    save_tiny(tmp_path / "model", "llama", torch.bfloat16, **SIZES)
    asked = [prompt(length, 90, length) for length in (3, 17)]
    settings = SETTINGS | on | {"quantization": quantization, "enforce_eager": is_eager}
    with Engine(tmp_path / "model", **settings) as engine:
        before = [output.token_ids for output in engine.generate(asked, GREEDY)]
        for _ in range(2 if on["device"] == "cuda" else 1):
            held = torch.cuda.memory_reserved() if on["device"] == "cuda" else 0
            engine.stop_model()
            engine.unload_weights()
            if held:
                assert held - torch.cuda.memory_reserved() >= 250 << 20
            engine.reload_weights()
            engine.start_model()
            assert [output.token_ids for output in engine.generate(asked, GREEDY)] == before
        engine.stop_model()
        engine.reload_weights()  # in place
        engine.start_model()
        assert [output.token_ids for output in engine.generate(asked, GREEDY)] == before


def test_room_for_keys_and_values_of_latents_is_given_back_too(
    tmp_path: Path, on: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = EmulatorDriver()
    if on["device"] != "cuda":
        monkeypatch.setattr(modules, "driver", lambda: driver)
    monkeypatch.setattr(step_layout, "LEAST_ROWS", 2)
    save_latent(tmp_path, "v3", num_hidden_layers=2, first_k_dense_replace=1, qk_rope_head_dim=16, v_head_dim=16)
    asked = [prompt(50, 97, 1), prompt(20, 97, 2)]
    with Engine(tmp_path, **SETTINGS, **on) as engine:
        model = engine._loaded.model
        (room,) = {metadata.buffers for metadata in model.step_metadata}
        assert len(room) == 2
        assert {each.data_ptr() for each in room} <= {each.data_ptr() for each in model.buffers}
        before = [output.token_ids for output in engine.generate(asked, GREEDY)]
        engine.stop_model()
        engine.unload_weights()
        engine.reload_weights()
        engine.start_model()
        assert [output.token_ids for output in engine.generate(asked, GREEDY)] == before


@pytest.mark.gpu
def test_a_closed_engine_holds_no_memory_of_the_gpu(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", torch.bfloat16, **SIZES)
    with Engine(tmp_path / "model", device="cuda", kv_cache_bytes=256 << 20, **SETTINGS) as engine:
        engine.generate([[1, 2]], GREEDY)
        held = torch.cuda.memory_reserved()
    assert held - torch.cuda.memory_reserved() >= 250 << 20
