"""Weights in float32 as they are, whatever the method of the other layers: those of routers, which decide."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from allspan.kernels.packer import Packer
from allspan.protos.api.errors import InternalError
from allspan.worker.program.program import ProgramBuilder, Slot
from allspan.worker.quant.base import Epilogue, LinearShape, Source
from allspan.worker.weights.held_tensor import HeldTensor


class Exact:
    """A LinearMethod of layers that keep their products in a buffer of their own."""

    def tensors(self, shape: LinearShape) -> dict[str, HeldTensor]:
        held = {"weight": HeldTensor((shape.outputs, len(shape.inputs)), torch.float32)}
        return held | ({"bias": HeldTensor((shape.outputs,), torch.float32)} if shape.has_bias else {})

    def load(self, shape: LinearShape, source: Source, held: Mapping[str, Tensor], packer: Packer) -> None:
        first = 0
        for part, rows in enumerate(shape.parts):
            source.floats(part, range(rows), shape.inputs, held["weight"][first : first + rows])
            if shape.has_bias:
                source.bias(part, held["bias"][first : first + rows])
            first += rows

    def emit(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        x: Slot,
        out: Slot,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        if epilogue is not Epilogue.STORE:
            raise InternalError(f"a layer in float32 has no epilogue {epilogue}")
        program.op("linear", x, weights["weight"], weights.get("bias"), out)

    def emit_embedding(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        ids: Slot,
        first_row: int,
        out: Slot,
    ) -> None:
        raise InternalError("no embedding is held in float32 alone")
