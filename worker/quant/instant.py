"""InstantQuant: weights as unsigned 8- or 4-bit numbers, from the weights alone, as they are read.

For each output feature and group of inputs (or all of them, per channel): scale = (most - least) / (codes - 1),
code = round((w - least) / scale), w ≈ code · scale + least, after the public description of DashInfer's InstantQuant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allspan.kernels.packer import Packer
from allspan.worker.quant.base import LinearShape, Source
from allspan.worker.quant.packed import Chunk, Layout, PackedMethod, block_inputs
from allspan.worker.quant.plain import Plain


@dataclass(frozen=True, slots=True)
class Scheme:
    """`activation` as in `allspan.kernels.packed_spec.ACTIVATIONS`."""

    bits: int
    activation: str
    groups: tuple[int, ...]
    """Inputs that may share a scale, the default first; -1: all of them."""


SCHEMES = {
    "int8": Scheme(8, "a16", (-1, 32, 64, 128, 256, 512)),
    "uint4": Scheme(4, "a16", (32, 64, 128, 256, 512, -1)),
    "a8w8": Scheme(8, "a8", (-1, 32, 64, 128, 256, 512)),
    "a8w4": Scheme(4, "a8", (32, 64, 128, 256, 512, -1)),
}
"""`--quantization` → what it means."""


class InstantQuant(PackedMethod):
    """A scheme with one of its groups; the embedding and the head are left in `dtype`."""

    def __init__(self, scheme: Scheme, group: int, dtype: torch.dtype) -> None:
        kind = "channel" if group == -1 else "group"
        self._layout = Layout(f"{kind}{scheme.bits}", scheme.activation, max(group, 0))
        self._plain = Plain(dtype)

    def layout(self, shape: LinearShape, part: int) -> Layout:
        return self._plain.layout(shape, part) if shape.is_vocabulary else self._layout

    def fill(self, shape: LinearShape, chunk: Chunk, source: Source, packer: Packer) -> None:
        if shape.is_vocabulary:
            self._plain.fill(shape, chunk, source, packer)
            return
        spec = chunk.target.spec
        inputs = block_inputs(spec, shape) if spec.group else range(shape.all_inputs)
        values = torch.empty((len(chunk.rows), len(inputs)))
        source.floats(chunk.part, chunk.rows, inputs, values)
        packer.quantise(values, shape.inputs.start - inputs.start, chunk.target)
