"""fp8: weights as e4m3 numbers, as a checkpoint has them, or made of others as they are read, with a scale for each
output feature, or for each group of its inputs, too."""

from __future__ import annotations

import torch

from allspan.kernels.packer import Packer
from allspan.worker.quant.base import LinearShape, Source
from allspan.worker.quant.packed import Chunk, Layout, block_inputs
from allspan.worker.quant.stored import Stored
from allspan.worker.weights.quantised_folder import PLAIN

GROUPS = (-1, 128)
"""Inputs that may share a scale, the default first; -1: all of them."""


class Fp8(Stored):
    """`--quantization fp8`; the embedding and the head are left in `dtype`, and so is what a checkpoint of fp8 weights
    has left as it was."""

    def __init__(self, group: int, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._made = Layout("fp8" if group == -1 else "fp8_block", "e4m3")

    def layout(self, shape: LinearShape, part: int) -> Layout:
        return self._made if self._is_made(shape, part) else super().layout(shape, part)

    def fill(self, shape: LinearShape, chunk: Chunk, source: Source, packer: Packer) -> None:
        if not self._is_made(shape, chunk.part):
            super().fill(shape, chunk, source, packer)
            return
        spec = chunk.target.spec
        inputs = block_inputs(spec, shape) if spec.kind.scale_bytes else range(shape.all_inputs)
        values = torch.empty((len(chunk.rows), len(inputs)))
        source.floats(chunk.part, chunk.rows, inputs, values)
        packer.quantise(values, shape.inputs.start - inputs.start, chunk.target)

    def _is_made(self, shape: LinearShape, part: int) -> bool:
        kind = shape.stored[part] if shape.stored else ""
        return not shape.is_vocabulary and kind != PLAIN and not kind.startswith("fp8/")
