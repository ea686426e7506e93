"""Programs as data, and what runs them."""

from __future__ import annotations

import pytest
import torch

from allspan.kernels.table import backends, op_set
from allspan.protos.api.errors import InternalError
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.program.native_program import NativeProgram
from allspan.worker.program.program import Interpreter, ProgramBuilder, Rows


@pytest.mark.parametrize("backend", backends())
def test_columns_of_a_buffer_are_a_part_of_its_memory(backend: str) -> None:
    builder = ProgramBuilder()
    both, normed = builder.buffer("both", Rows.TOKENS, 10), builder.buffer("normed", Rows.TOKENS, 6)
    builder.op("add", builder.named("x"), both)
    columns = builder.columns(both, 3, 2, 3)
    builder.op("rms_norm", builder.view(columns, 6), builder.named("weight"), 1e-6, normed)
    program, ops, capacity = builder.build(normed), op_set(backend), {Rows.TOKENS: 5, Rows.LOGITS: 1}
    runs = NativeProgram if ops.program is not None else Interpreter
    more = () if ops.program is not None else ("cpu",)
    runner = runs(program, ops, LocalCollectives(), capacity, *more)
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(1))
    runner.bind({"x": x[:3], "weight": torch.ones(6)} if runs is Interpreter else {"x": x, "weight": torch.ones(6)})
    found, expected = runner.run({}, 3, 0), torch.empty(3, 6)
    ops.rms_norm(x[:3, 3:9].contiguous(), torch.ones(6), 1e-6, expected)
    assert found.equal(expected)
    assert runner.rows(columns)[:3].equal(x[:3, 3:9].view(3, 2, 3))


def test_columns_behind_a_buffer_are_refused() -> None:
    builder = ProgramBuilder()
    with pytest.raises(InternalError, match=r"'both' of shape \(10,\) has no columns 3 to 11"):
        builder.columns(builder.buffer("both", Rows.TOKENS, 10), 3, 2, 4)
