"""Weights as they are, in float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from allspan.worker.models.program import ProgramBuilder, Slot
from allspan.worker.quant.base import HeldTensor, LinearShape, PartReader


class Plain:
    """See `allspan.worker.quant.base.LinearMethod`. Parts are stacked into one weight; biases are float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def tensors(self, shape: LinearShape) -> dict[str, HeldTensor]:
        held = {"weight": HeldTensor((shape.out_features, shape.in_features), self._dtype)}
        if shape.has_bias:
            held["bias"] = HeldTensor((shape.out_features,), torch.float32)
        return held

    def load(self, shape: LinearShape, read: PartReader, held: Mapping[str, Tensor]) -> None:
        for suffix, tensor in held.items():
            for part, rows in enumerate(torch.split(tensor, list(shape.part_rows))):
                read(part, suffix, rows)

    def emit(self, program: ProgramBuilder, weights: Mapping[str, Slot], x: Slot, out: Slot) -> None:
        program.op("linear", x, weights["weight"], weights.get("bias"), out)
