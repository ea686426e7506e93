"""The unquantised method: what it holds, how it fills it, and the op that it emits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allspan.worker.models.program import ProgramBuilder, Rows
from allspan.worker.quant.base import LinearShape
from allspan.worker.quant.table import METHODS


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_parts_are_stacked_and_biases_stay_float32(dtype: str, item: int) -> None:
    method = METHODS["none"](getattr(torch, dtype))
    shape = LinearShape(part_rows=(3, 2), in_features=4, has_bias=True)
    declared = method.tensors(shape)
    assert declared["weight"].num_bytes == 5 * 4 * item
    assert declared["bias"].num_bytes == 5 * 4
    held = {suffix: torch.empty(tensor.shape, dtype=tensor.dtype) for suffix, tensor in declared.items()}
    asked = []

    def read(part: int, suffix: str, out: Tensor) -> None:
        asked.append((part, suffix, tuple(out.shape)))
        out.fill_(part + 1)

    method.load(shape, read, held)
    assert sorted(asked) == [(0, "bias", (3,)), (0, "weight", (3, 4)), (1, "bias", (2,)), (1, "weight", (2, 4))]
    assert held["weight"].sum(1).tolist() == [4, 4, 4, 8, 8]
    assert held["bias"].tolist() == [1, 1, 1, 2, 2]


def test_without_a_bias_the_op_gets_none() -> None:
    method = METHODS["none"](torch.float32)
    assert list(method.tensors(LinearShape((3,), 4, has_bias=False))) == ["weight"]
    builder = ProgramBuilder()
    x, out = builder.buffer("x", Rows.TOKENS, 4), builder.buffer("out", Rows.LOGITS, 3)
    weight, bias = builder.named("weight"), builder.named("bias")
    method.emit(builder, {"weight": weight}, x, out)
    method.emit(builder, {"weight": weight, "bias": bias}, x, out)
    first, second = builder.build(out).ops
    assert first.arguments == (x, weight, None, out)
    assert second.arguments == (x, weight, bias, out)
    assert first.rows is Rows.LOGITS
