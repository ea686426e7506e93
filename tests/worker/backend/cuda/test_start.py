"""What happens on a GPU before the first request: every kernel that the engine will launch is compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan import Engine, SamplingParams
from allspan.kernels.cuda.jit import modules
from allspan.worker.backend.cuda.warmup import warm_up
from allspan.worker.sampling.device import Sampling
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.model import DeviceModel
from support.draft_heads import save_eagle3
from support.emulator.backend import EmulatedBackend, add_device
from support.emulator.driver import EmulatorDriver
from support.tiny_models import prompt, save_tiny

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 48,
    "page_size": 16,
    "kv_cache_bytes": 2_000_000,
}
SIZES = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model", "llama", torch.bfloat16, **SIZES)
    return tmp_path / "model"


def generate(engine: Engine) -> None:
    asked = [prompt(length, 90, length) for length in (3, 1, 70)]
    engine.generate(asked, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))


def test_what_the_engine_launches_was_prepared(
    model: Path, emulator: EmulatorDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "driver", lambda: emulator)
    monkeypatch.setattr(emulator, "prepared", [])
    with Engine(model, **add_device(monkeypatch), **SETTINGS) as engine:
        monkeypatch.setattr(emulator, "launched", [])
        generate(engine)
    assert emulator.launched
    assert set(emulator.launched) <= set(emulator.prepared)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_drafts_launches_was_prepared(
    method: str, model: Path, tmp_path: Path, emulator: EmulatorDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "driver", lambda: emulator)
    monkeypatch.setattr(emulator, "prepared", [])
    save_eagle3(tmp_path / "head", 97, 40, 128, 128, eagle_aux_hidden_state_layer_ids=[0, 1, 1])
    asks = json.dumps({"method": method, "model": str(model if method == "draft_model" else tmp_path / "head")})
    with Engine(model, **add_device(monkeypatch), **SETTINGS, speculative_config=asks) as engine:
        monkeypatch.setattr(emulator, "launched", [])
        engine.generate([prompt(9, 90)], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        assert engine.statistics().drafts
    assert set(emulator.launched) <= set(emulator.prepared)


class SamplesItself(EmulatedBackend):
    """Warms up as on a GPU, whose kernels sample."""

    def warm_up(self, model: DeviceModel, sizes: BatchSizes, sampling: Sampling) -> int:
        return warm_up(model, self.step_inputs(sizes, model), sizes, torch.device("cpu"), lambda: None)


def test_every_kernel_that_samples_was_prepared(
    model: Path, emulator: EmulatorDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "driver", lambda: emulator)
    monkeypatch.setattr(emulator, "prepared", [])
    with Engine(model, **add_device(monkeypatch, backend=SamplesItself), **SETTINGS):
        assert {"change_rows.cu", "likely_tokens.cu", "sample_rows.cu", "scan.cu"} <= {
            Path(kernel.file).name for kernel in emulator.prepared
        }


def test_a_thread_that_notes_launches_makes_none(emulator: EmulatorDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "driver", lambda: emulator)
    monkeypatch.setattr(emulator, "launched", [])
    what = modules.kernel("toy.cu", "toy")
    with modules.noting() as kernels:
        modules.launch(what, (1,), 32, ())
        modules.launch(what, (2,), 32, ())
        assert modules.is_noting()
    assert (list(kernels), emulator.launched, modules.is_noting()) == ([what], [], False)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "int8", "uint4", "fp8"])
def test_nothing_is_compiled_once_the_engine_is_up(
    quantization: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("ALLSPAN_HOME", str(tmp_path / "home"))
    with Engine(model, device="cuda", quantization=quantization, **SETTINGS) as engine:
        assert "kernels: compiling" in caplog.text
        before = {path.name for path in (tmp_path / "home/kernels").iterdir()}
        generate(engine)
        sampled = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, top_k=20, logprobs=2, presence_penalty=0.5)
        engine.generate([prompt(9, 90)], sampled)
    assert {path.name for path in (tmp_path / "home/kernels").iterdir()} == before
