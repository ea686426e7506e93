"""Weights as a GGUF file holds them: its blocks are laid out anew, and nothing is quantised again."""

from __future__ import annotations

import torch

from allspan.kernels.packed_spec import ROW_FORMATS
from allspan.kernels.packer import Packer
from allspan.worker.quant.base import LinearShape, Source
from allspan.worker.quant.packed import Chunk, Layout, PackedMethod, block_inputs
from allspan.worker.quant.plain import Plain

NATIVE = {
    "Q8_0": Layout("q8_0", "a8"),
    "Q4_0": Layout("q4_0", "a8"),
    "Q4_1": Layout("group4", "a8", 32),
    "Q5_0": Layout("q5_0", "a8"),
    "Q5_1": Layout("q5_1", "a8"),
    "Q4_K": Layout("q4_k", "a8"),
    "Q5_K": Layout("q5_k", "a8"),
    "Q6_K": Layout("q6_k", "a8"),
    "Q3_K": Layout("q3_k", "a8"),
    "Q2_K": Layout("q2_k", "a8"),
    "IQ4_NL": Layout("iq4_nl", "a8"),
    "IQ4_XS": Layout("iq4_xs", "a8"),
    "MXFP4": Layout("mxfp4", "a8"),
    "IQ3_S": Layout("iq3_s", "a8"),
    "IQ3_XXS": Layout("iq3_xxs", "a8"),
    "IQ2_S": Layout("iq2_s", "a8"),
    "IQ2_XS": Layout("iq2_xs", "a8"),
    "IQ2_XXS": Layout("iq2_xxs", "a8"),
}
"""Types that are computed with as they are; others are decoded and held as plain floats."""


def native(kind: str, memory: str) -> Layout | None:
    """The layout of a type that is computed with as it is."""
    layout = NATIVE.get(kind)
    return layout if layout is not None and (memory == "panels" or layout.format in ROW_FORMATS) else None


class Gguf(PackedMethod):
    """`--quantization gguf`: every matrix in its own type, the embedding and the head too."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._plain = Plain(dtype)

    def layout(self, shape: LinearShape, part: int) -> Layout:
        return native(shape.stored[part], shape.memory) or self._plain.layout(shape, part)

    def fill(self, shape: LinearShape, chunk: Chunk, source: Source, packer: Packer) -> None:
        if native(shape.stored[chunk.part], shape.memory):
            blocks = source.blocks(chunk.part, chunk.rows, block_inputs(chunk.target.spec, shape))
            packer.blocks(blocks, chunk.target)
        else:
            self._plain.fill(shape, chunk, source, packer)
