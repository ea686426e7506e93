"""A model family, a linear method and a kernel backend are new files and one row each: an alarm for moved seams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from allspan.kernels.packer import Packer
from allspan.kernels.table import BACKENDS, REFERENCE, Backend, backends, op_set
from allspan.worker.load.registry import FAMILIES
from allspan.worker.models.foreign.common import alike, model_spec, read_context, read_gated_mlp, read_gqa
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.spec import ModelSpec
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.program.native_program import NativeProgram
from allspan.worker.program.program import Interpreter, ProgramBuilder, Rows, Slot
from allspan.worker.quant.base import Epilogue, LinearShape, Source
from allspan.worker.quant.table import METHODS
from allspan.worker.weights.held_tensor import HeldTensor
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
        rotary = read_rotary(config, 2048)
        layers = alike(config, read_gqa(config, rotary), read_gated_mlp(config))
        return model_spec(config, "toy", layers, read_context(config, rotary, 2048))

    monkeypatch.setitem(FAMILIES, "toy", Family("toy", ("ToyForCausalLM",), read))
    config = json.loads((tiny / "config.json").read_text())
    config |= {"model_type": "toy", "architectures": ["ToyForCausalLM"]}
    (tiny / "config.json").write_text(json.dumps(config))
    for ranks in (1, 2):
        torch.testing.assert_close(logits_on_ranks(tiny, ranks, [PROMPT])[0], expected, rtol=1e-4, atol=1e-4)


class HighAndLow:
    """Holds each weight as a bfloat16 part and the float32 rest, and adds two products."""

    def __init__(self, dtype: torch.dtype, group: int) -> None:
        pass

    def tensors(self, shape: LinearShape) -> dict[str, HeldTensor]:
        size = (shape.outputs, len(shape.inputs))
        held = {"high": HeldTensor(size, torch.bfloat16), "low": HeldTensor(size, torch.float32)}
        return held | ({"bias": HeldTensor((shape.outputs,), torch.float32)} if shape.has_bias else {})

    def load(self, shape: LinearShape, source: Source, held: Mapping[str, Tensor], packer: Packer) -> None:
        rows = list(shape.parts)
        for part, low in enumerate(torch.split(held["low"], rows)):
            source.floats(part, range(rows[part]), shape.inputs, low)
        held["high"].copy_(held["low"])
        held["low"].sub_(held["high"].float())
        for part, bias in enumerate(torch.split(held["bias"], rows) if shape.has_bias else ()):
            source.bias(part, bias)

    def emit(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        x: Slot,
        out: Slot,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        product = out if epilogue is Epilogue.STORE else program.scratch("high", out, shape.outputs)
        rest = program.scratch("low", out, shape.outputs)
        program.op("linear", x, weights["high"], weights.get("bias"), product)
        program.op("linear", x, weights["low"], None, rest)
        program.op("add", rest, product)
        if epilogue is not Epilogue.STORE:
            epilogue.finish(program, product, out)

    def emit_embedding(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        ids: Slot,
        first_row: int,
        out: Slot,
    ) -> None:
        rest = program.scratch("low", out)
        program.op("embedding", ids, weights["high"], first_row, out)
        program.op("embedding", ids, weights["low"], first_row, rest)
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


@pytest.mark.parametrize("backend", backends())
def test_an_op_that_has_only_a_reference_runs_on_every_backend(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(REFERENCE, "toy_double", "support.toy_kernels:toy_double")
    builder = ProgramBuilder()
    x = builder.named("x")
    doubled = builder.buffer("doubled", Rows.TOKENS, 4)
    builder.op("toy_double", x, doubled)
    builder.op("add", x, doubled)
    program, ops, capacity = builder.build(doubled), op_set(backend), {Rows.TOKENS: 3, Rows.LOGITS: 1}
    runner: Interpreter | NativeProgram
    if getattr(ops, "program", None) is None:
        runner = Interpreter(program, ops, LocalCollectives(), capacity, "cpu")
    else:
        runner = NativeProgram(program, ops, LocalCollectives(), capacity)
        assert f"backend {backend.partition('/')[0]} has no toy_double; using the reference" in caplog.text
    values = torch.arange(12, dtype=torch.float32).view(3, 4)
    runner.bind({"x": values})
    assert runner.run({}, 3, 0).equal(3 * values)
