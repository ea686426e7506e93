"""A model family, a linear method and a kernel backend are new files and one row each: an alarm for moved seams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from allspan.kernels.table import BACKENDS, Backend
from allspan.worker.models.families.common import Family, Features, dense_spec
from allspan.worker.models.foreign import ForeignConfig
from allspan.worker.models.program import ProgramBuilder, Slot
from allspan.worker.models.registry import FAMILIES
from allspan.worker.models.spec import ModelSpec
from allspan.worker.quant.base import HeldTensor, LinearShape, PartReader
from allspan.worker.quant.table import METHODS
from support import toy_kernels
from support.tiny_models import logits_on_ranks, save_tiny

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    save_tiny(tmp_path, "llama2")
    return tmp_path


@pytest.fixture
def expected(tiny: Path) -> Tensor:
    return logits_on_ranks(tiny, 1, [PROMPT])[0]


def test_a_family_from_outside_runs(tiny: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(config: ForeignConfig) -> ModelSpec:
        return dense_spec(config, "toy", Features())

    monkeypatch.setitem(FAMILIES, "toy", Family("toy", "ToyForCausalLM", read))
    config = json.loads((tiny / "config.json").read_text())
    config |= {"model_type": "toy", "architectures": ["ToyForCausalLM"]}
    (tiny / "config.json").write_text(json.dumps(config))
    for ranks in (1, 2):
        torch.testing.assert_close(logits_on_ranks(tiny, ranks, [PROMPT])[0], expected, rtol=1e-4, atol=1e-4)


class HighAndLow:
    """Holds each weight as a bfloat16 part and the float32 rest, and adds two products."""

    def __init__(self, dtype: torch.dtype) -> None:
        pass

    def tensors(self, shape: LinearShape) -> dict[str, HeldTensor]:
        size = (shape.out_features, shape.in_features)
        held = {"high": HeldTensor(size, torch.bfloat16), "low": HeldTensor(size, torch.float32)}
        return held | ({"bias": HeldTensor((shape.out_features,), torch.float32)} if shape.has_bias else {})

    def load(self, shape: LinearShape, read: PartReader, held: Mapping[str, Tensor]) -> None:
        rows = list(shape.part_rows)
        for part, (high, low) in enumerate(
            zip(torch.split(held["high"], rows), torch.split(held["low"], rows), strict=True)
        ):
            read(part, "weight", low)
            high.copy_(low)
            low -= high.float()
        for part, bias in enumerate(torch.split(held["bias"], rows) if shape.has_bias else ()):
            read(part, "bias", bias)

    def emit(self, program: ProgramBuilder, weights: Mapping[str, Slot], x: Slot, out: Slot) -> None:
        rest = program.scratch("high_and_low.rest", like=out)
        program.op("linear", x, weights["high"], weights.get("bias"), out)
        program.op("linear", x, weights["low"], None, rest)
        program.op("add", rest, out)


def test_a_linear_method_from_outside_runs(tiny: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "high-and-low", HighAndLow)
    for ranks in (1, 2):
        found = logits_on_ranks(tiny, ranks, [PROMPT], quantization="high-and-low")[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_kernel_backend_from_outside_runs_with_the_reference_for_what_it_lacks(
    tiny: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(BACKENDS, "toy", Backend({"rms_norm": "support.toy_kernels:rms_norm"}))
    toy_kernels.calls.clear()
    found = logits_on_ranks(tiny, 1, [PROMPT], backend="toy")[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert toy_kernels.calls
    assert "backend toy has no embedding" in caplog.text
