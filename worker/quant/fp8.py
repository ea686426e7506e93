"""fp8: weights as e4m3 numbers with a scale for each output feature, from the weights alone, as they are read."""

from __future__ import annotations

import torch

from allspan.kernels.packing import Packer
from allspan.worker.quant.base import LinearShape, Source
from allspan.worker.quant.packed import Chunk, Layout, PackedMethod
from allspan.worker.quant.plain import Plain


class Fp8(PackedMethod):
    """`--quantization fp8`; the embedding and the head are left in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._plain = Plain(dtype)

    def layout(self, shape: LinearShape, part: int) -> Layout:
        return self._plain.layout(shape, part) if shape.is_vocabulary else Layout("fp8", "e4m3")

    def fill(self, shape: LinearShape, chunk: Chunk, source: Source, packer: Packer) -> None:
        if shape.is_vocabulary:
            self._plain.fill(shape, chunk, source, packer)
            return
        values = torch.empty((len(chunk.rows), shape.all_inputs))
        source.floats(chunk.part, chunk.rows, range(shape.all_inputs), values)
        packer.quantise(values, shape.inputs.start, chunk.target)
