"""Weights and KV pages that are given back to the GPU, and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from allspan import Engine, SamplingParams
from support.emulator.backend import add_device
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


@pytest.mark.gpu
def test_a_closed_engine_holds_no_memory_of_the_gpu(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", torch.bfloat16, **SIZES)
    with Engine(tmp_path / "model", device="cuda", kv_cache_bytes=256 << 20, **SETTINGS) as engine:
        engine.generate([[1, 2]], GREEDY)
        held = torch.cuda.memory_reserved()
    assert held - torch.cuda.memory_reserved() >= 250 << 20
