"""What makes the keys and values of each head of a latent, as plain matrices that `latent_attention` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from allspan.kernels.packer import Packer
from allspan.protos.api.errors import InternalError
from allspan.worker.program.program import ProgramBuilder, Slot
from allspan.worker.quant.base import Epilogue, LinearShape, Source
from allspan.worker.weights.held_tensor import HeldTensor


@dataclass(frozen=True, slots=True)
class ByHead:
    """A LinearMethod of a layer of one part whose rows are `head_rows` of each head, `key_rows` of keys and then those
    of values. Holds "k_up" [heads, inputs, key_rows] and "v_up" [heads, value_rows, inputs]: see
    `allspan.kernels.ops.LatentWeights`. They are never quantised, as keys are summed along the other dimension than
    that of a checkpoint's scales."""

    head_rows: int
    key_rows: int
    dtype: torch.dtype

    def tensors(self, shape: LinearShape) -> dict[str, HeldTensor]:
        heads, inputs = shape.outputs // self.head_rows, len(shape.inputs)
        return {
            "k_up": HeldTensor((heads, inputs, self.key_rows), self.dtype),
            "v_up": HeldTensor((heads, self.head_rows - self.key_rows, inputs), self.dtype),
        }

    def load(self, shape: LinearShape, source: Source, held: Mapping[str, Tensor], packer: Packer) -> None:
        rows = torch.empty((shape.outputs, len(shape.inputs)), dtype=self.dtype)
        source.floats(0, range(shape.outputs), shape.inputs, rows)
        heads = rows.view(-1, self.head_rows, len(shape.inputs))
        held["k_up"].copy_(heads[:, : self.key_rows].transpose(1, 2))
        held["v_up"].copy_(heads[:, self.key_rows :])

    def emit(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        x: Slot,
        out: Slot,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        raise InternalError("a layer that is held head by head is applied by latent_attention alone")

    def emit_embedding(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        ids: Slot,
        first_row: int,
        out: Slot,
    ) -> None:
        raise InternalError("no embedding is held head by head")
