"""Weights as they are, in float32, bfloat16 or float16."""

from __future__ import annotations

import torch

from allspan.kernels.packer import Packer
from allspan.worker.quant.base import LinearShape, Source
from allspan.worker.quant.packed import Chunk, Layout, PackedMethod

_LAYOUTS = {
    torch.float32: Layout("f32", "f32"),
    torch.bfloat16: Layout("bf16", "bf16"),
    torch.float16: Layout("f16", "f16"),
}


class Plain(PackedMethod):
    """`--quantization none`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def layout(self, shape: LinearShape, part: int) -> Layout:
        return _LAYOUTS[self._dtype]

    def fill(self, shape: LinearShape, chunk: Chunk, source: Source, packer: Packer) -> None:
        values = torch.empty((len(chunk.rows), len(shape.inputs)), dtype=self._dtype)
        source.floats(chunk.part, chunk.rows, shape.inputs, values)
        packer.floats(values, chunk.target)
