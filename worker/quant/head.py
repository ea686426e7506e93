"""A head in 8 bits beside another method's layers: `--quantize-lm-head`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from allspan.kernels.packer import Packer
from allspan.worker.program.program import ProgramBuilder, Slot
from allspan.worker.quant.base import Epilogue, LinearMethod, LinearShape, Source
from allspan.worker.quant.instant import SCHEMES, InstantQuant
from allspan.worker.quant.packed import PackedMethod, PackedPart
from allspan.worker.weights.held_tensor import HeldTensor


class QuantisedHead:
    """A LinearMethod: InstantQuant's int8, a scale for each token, of the head and of an embedding that is tied to it,
    where `rest` would not hold them quantised; `rest` of all else."""

    def __init__(self, rest: PackedMethod, dtype: torch.dtype) -> None:
        self._rest = rest
        self._head = InstantQuant(SCHEMES["int8"], -1, dtype)

    def tensors(self, shape: LinearShape) -> dict[str, HeldTensor]:
        method, shape = self._of(shape)
        return method.tensors(shape)

    def load(self, shape: LinearShape, source: Source, held: Mapping[str, Tensor], packer: Packer) -> None:
        method, shape = self._of(shape)
        method.load(shape, source, held, packer)

    def emit(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        x: Slot,
        out: Slot,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        method, shape = self._of(shape)
        method.emit(program, shape, weights, x, out, epilogue)

    def emit_embedding(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        ids: Slot,
        first_row: int,
        out: Slot,
    ) -> None:
        method, shape = self._of(shape)
        method.emit_embedding(program, shape, weights, ids, first_row, out)

    def packed(self, shape: LinearShape) -> tuple[PackedPart, ...]:
        """The packed weights of a layer."""
        return (self._head if self._of(shape)[0] is self._head else self._rest).packed(self._of(shape)[1])

    def _of(self, shape: LinearShape) -> tuple[LinearMethod, LinearShape]:
        if shape.is_head and not any(part.spec.kind.is_quantised for part in self._rest.packed(shape)):
            return self._head, replace(shape, is_vocabulary=False, stored=())
        return self._rest, shape
