"""Models whose weights lie in rows, as on a GPU, computed with the reference ops on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig, ServiceConfig, WorkerConfig
from allspan.worker.backend.cuda.backend import check_capability, kernels_for
from allspan.worker.load import loader
from allspan.worker.tools.convert import convert
from support.tiny_gguf import save_gguf
from support.tiny_models import logits_on_ranks, prompt, save_tiny

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_key_value_heads": 2}
PROMPTS = [prompt(21, 97), prompt(5, 97, 1)]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if the device were a GPU."""
    monkeypatch.setattr(loader, "memory_of", lambda device, dtype: "rows")
    return monkeypatch


def logits(path: Path, ranks: int, **config: Any) -> torch.Tensor:
    return torch.cat(logits_on_ranks(path, ranks, PROMPTS, dtype="bfloat16", **config))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("quantization", ["none", "int8", "uint4", "a8w8"])
def test_logits_are_those_with_panels(quantization: str, ranks: int, tmp_path: Path, rows: pytest.MonkeyPatch) -> None:
    """A rank's inputs begin within a group (77 of the intermediate size)."""
    save_tiny(tmp_path, "llama")
    found = logits(tmp_path, ranks, quantization=quantization)
    rows.undo()
    torch.testing.assert_close(found, logits(tmp_path, ranks, quantization=quantization), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_float16_is_nearer_to_float32_than_bfloat16_is(ranks: int, tmp_path: Path, rows: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "llama", torch.float16)
    halves = [torch.cat(logits_on_ranks(tmp_path, ranks, PROMPTS, dtype=name)) for name in ("float16", "bfloat16")]
    rows.undo()
    exact = torch.cat(logits_on_ranks(tmp_path, 1, PROMPTS, dtype="float32"))
    errors = [float((found - exact).abs().max() / exact.abs().max()) for found in halves]
    assert errors[0] < 0.003
    assert errors[0] < errors[1] / 4


def test_fp8_is_near_bfloat16_and_refused_where_weights_lie_in_panels(tmp_path: Path, rows: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "llama")
    plain = logits(tmp_path, 2)
    for group in (-1, 128):
        found = logits(tmp_path, 2, quantization="fp8", quantization_group=group)
        assert 0 < (plain - found).abs().max() / plain.abs().max() < 0.15
    rows.undo()
    with pytest.raises(ConfigError, match="quantization 'fp8' is for models of 16 bits on GPUs; device is cpu"):
        logits(tmp_path, 1, quantization="fp8")


def test_gguf_types_that_rows_do_not_hold_are_decoded(
    tmp_path: Path, rows: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = {}
    for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_0):
        model = save_tiny(tmp_path, "llama", **SIZES, rope_parameters=PLAIN_ROPE)
        files[kind.name] = tmp_path / f"{kind.name}.gguf"
        save_gguf(files[kind.name], model, kind)
    held, decoded = (logits(path, 1) for path in files.values())
    assert "tensors of type Q5_0 are decoded and held as bfloat16" in caplog.text
    assert "Q8_0" not in caplog.text
    rows.undo()
    torch.testing.assert_close(held, logits(files["Q8_0"], 1), rtol=1e-4, atol=1e-4)
    error = (decoded - logits(files["Q5_0"], 1)).abs().max() / decoded.abs().max()
    assert error < 0.15  # panels round activations to 8 bits there


def test_converted_weights_are_refused_where_weights_lie_in_rows(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_tiny(source, "llama")
    out.mkdir()
    model = ModelConfig(path=str(source), name="tiny", dtype="bfloat16")
    convert(WorkerConfig(model, ServiceConfig(run_dir="/nowhere")), 1, out)
    on_gpu = ModelConfig(path=str(out), name="tiny", device="cuda")
    with pytest.raises(ConfigError, match="converted weights lie in panels, for CPUs; device is cuda: load the model"):
        loader.prepare(on_gpu, CacheConfig(), 0, 1)


def test_a_gpu_that_is_too_old_is_told_with_what_runs_on_it() -> None:
    check_capability("bfloat16", (8, 0))
    check_capability("float16", (7, 5))
    with pytest.raises(ConfigError, match=r"capability 8\.0 or later, this one has 7\.5: use --dtype float16"):
        check_capability("bfloat16", (7, 5))
    with pytest.raises(ConfigError, match=r"this one has 7\.0: use --dtype float32"):
        check_capability("float16", (7, 0))


def test_sixteen_bits_on_a_gpu_are_what_lies_in_rows() -> None:
    assert loader.memory_of("cuda", "bfloat16") == loader.memory_of("cuda", "float16") == "rows"
    assert loader.memory_of("cuda", "float32") == loader.memory_of("cpu", "bfloat16") == "panels"


@pytest.mark.parametrize(
    ("shape", "dtype", "pages", "backend"),
    [
        ({}, "bfloat16", "auto", "cuda"),
        ({}, "float16", "auto", "cuda"),
        ({}, "float16", "float32", "reference"),
        ({}, "bfloat16", "uint4", "reference"),
        ({}, "float32", "auto", "reference"),
        ({"head_dim": 20}, "bfloat16", "auto", "reference"),
        ({"num_attention_heads": 17, "num_key_value_heads": 1, "hidden_size": 68}, "bfloat16", "auto", "reference"),
    ],
)
def test_what_the_kernels_are_not_for_runs_on_the_reference(
    shape: dict[str, Any], dtype: str, pages: str, backend: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama2", **(SIZES | {"head_dim": 16} | shape))
    config = ModelConfig(str(tmp_path), "m", dtype=dtype, device="cuda")
    prepared = loader.prepare(config, CacheConfig(kv_cache_dtype=pages), 0, 1)
    assert kernels_for(prepared.kernel_needs) == backend
