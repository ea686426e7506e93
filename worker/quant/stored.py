"""Weights as a quantised checkpoint holds them: codes are laid out anew, and nothing is quantised again."""

from __future__ import annotations

from dataclasses import replace

import torch

from allspan.kernels.packed_spec import FORMATS, ROW_FORMATS
from allspan.kernels.packer import Packer
from allspan.worker.quant.base import LinearShape, Source
from allspan.worker.quant.packed import Chunk, Layout, PackedMethod, block_inputs
from allspan.worker.quant.plain import Plain
from allspan.worker.weights.quantised_matrix import IRREGULAR

_GROUPS = (32, 64, 128, 256, 512)
_INTEGERS = {"int4": (4, "a16"), "int8": (8, "a16"), "a8w8": (8, "a8")}
_LAYOUTS = {
    "fp8/-1": Layout("fp8", "e4m3"),
    "fp8/128": Layout("fp8_block", "e4m3"),
    **{f"{name}/-1": Layout(f"channel{bits}", activation) for name, (bits, activation) in _INTEGERS.items()},
    **{
        f"{name}/{group}": Layout(f"group{bits}", activation, group)
        for name, (bits, activation) in _INTEGERS.items()
        for group in _GROUPS
    },
}
"""`allspan.worker.weights.quantised_matrix.QuantisedMatrix.kind` → how it is held."""


def stored_layout(kind: str, shape: LinearShape) -> Layout | None:
    """Returns the layout of a kind that is computed with as it is; None: it is decoded. So are matrices whose inputs do
    not come group by group if the rank has only some of them."""
    held, order = kind, ""
    if kind.count("/") == 2:
        held, _, order = kind.rpartition("/")
    layout = _LAYOUTS.get(held)
    if layout is None or layout.format not in (ROW_FORMATS if shape.memory == "rows" else FORMATS):
        return None
    is_whole = len(shape.inputs) == shape.all_inputs and not shape.is_vocabulary  # embeddings gather nothing
    if order and (order == IRREGULAR or not is_whole):
        return None
    return replace(layout, order=order)


class Stored(PackedMethod):
    """What `--quantization auto` is for quantised safetensors: every matrix as it is stored, plain ones in `dtype`; and
    so are those that have no kernels, once decoded."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._plain = Plain(dtype)

    def layout(self, shape: LinearShape, part: int) -> Layout:
        return self._stored(shape, part) or self._plain.layout(shape, part)

    def fill(self, shape: LinearShape, chunk: Chunk, source: Source, packer: Packer) -> None:
        if self._stored(shape, chunk.part) is None:
            self._plain.fill(shape, chunk, source, packer)
            return
        spec = chunk.target.spec
        inputs = block_inputs(spec, shape) if spec.kind.scale_bytes else shape.inputs
        packer.fields(source.fields(chunk.part, chunk.rows, inputs, chunk.target.weight.device), chunk.target)

    def _stored(self, shape: LinearShape, part: int) -> Layout | None:
        return stored_layout(shape.stored[part], shape) if shape.stored else None
