"""What the methods share whose weights are packed: `allspan.kernels.packed` has the layouts."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from allspan.kernels.packed import FEATURES, FORMATS, PackedSpec
from allspan.kernels.packing import Packer, Target
from allspan.worker.models.program import ProgramBuilder, Slot
from allspan.worker.quant.base import Epilogue, HeldTensor, LinearShape, Source

_CHUNK = 1 << 20
"""Elements that are read at a time: bounds the temporaries and keeps them near the processor."""

_OPS = {Epilogue.ADD: "packed_linear_add", Epilogue.GATED: "packed_gated_linear"}


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A packed weight of a layer: all of it, or neighbouring parts that are held alike."""

    suffix: str
    spec: PackedSpec
    first_part: int
    column: int
    """Of the layer's outputs, the first one."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a part is to be packed."""

    format: str
    activation: str
    group: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a part of the layer, and where they go."""

    part: int
    rows: range
    target: Target


class PackedMethod(ABC):
    """See `allspan.worker.quant.base.LinearMethod`. One packed weight a layer, or, where parts are held differently,
    one for each run of parts that are alike. Biases are float32."""

    @abstractmethod
    def layout(self, shape: LinearShape, part: int) -> Layout:
        """How a part is held."""

    @abstractmethod
    def fill(self, shape: LinearShape, chunk: Chunk, source: Source, packer: Packer) -> None:
        """Reads and packs some rows."""

    def packed(self, shape: LinearShape) -> tuple[PackedPart, ...]:
        """The packed weights of a layer."""
        layouts = [self.layout(shape, part) for part in range(len(shape.parts))]
        runs: list[tuple[Layout, int]] = []
        for layout, alike in itertools.groupby(layouts):
            runs.append((layout, len(list(alike))))
        held: list[PackedPart] = []
        first = 0
        for layout, count in runs:
            parts = shape.parts[first : first + count]
            suffix = "weight" if len(runs) == 1 else f"weight.{len(held)}"
            spec = packed_spec(layout, shape, parts)
            held.append(PackedPart(suffix, spec, first, sum(shape.parts[:first])))
            first += count
        return tuple(held)

    def tensors(self, shape: LinearShape) -> dict[str, HeldTensor]:
        held = {part.suffix: HeldTensor(part.spec.shape, torch.uint8) for part in self.packed(shape)}
        if shape.has_bias:
            held["bias"] = HeldTensor((shape.outputs,), torch.float32)
        return held

    def load(self, shape: LinearShape, source: Source, held: Mapping[str, Tensor], packer: Packer) -> None:
        for packed in self.packed(shape):
            step = _CHUNK // max(1, shape.all_inputs) // FEATURES * FEATURES or FEATURES
            for number, size in enumerate(packed.spec.parts if shape.inputs else ()):
                for start in range(0, size, step):
                    rows = range(start, min(size, start + step))
                    target = Target(packed.spec, number, start, held[packed.suffix])
                    self.fill(shape, Chunk(packed.first_part + number, rows, target), source, packer)
        if shape.has_bias:
            for part, out in enumerate(torch.split(held["bias"], list(shape.parts))):
                source.bias(part, out)

    def emit(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        x: Slot,
        out: Slot,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        packed = self.packed(shape)
        bias = weights.get("bias")
        if epilogue is not Epilogue.STORE and len(packed) == 1:
            program.op(_OPS[epilogue], x, weights[packed[0].suffix], bias, packed[0].spec, out)
            return
        product = out if epilogue is Epilogue.STORE else program.scratch("product", out, shape.outputs)
        for part in packed:
            program.op("packed_linear", x, weights[part.suffix], bias, part.spec, product, part.column)
        if epilogue is not Epilogue.STORE:
            program.op("add" if epilogue is Epilogue.ADD else "silu_mul", product, out)

    def emit_embedding(
        self,
        program: ProgramBuilder,
        shape: LinearShape,
        weights: Mapping[str, Slot],
        ids: Slot,
        first_row: int,
        out: Slot,
    ) -> None:
        (packed,) = self.packed(shape)
        program.op("packed_embedding", ids, weights[packed.suffix], packed.spec, first_row, out)


def packed_spec(layout: Layout, shape: LinearShape, parts: Sequence[int]) -> PackedSpec:
    """Of neighbouring parts of a layer that are held alike."""
    spec = PackedSpec(
        layout.format,
        layout.activation,
        tuple(parts),
        len(shape.inputs),
        group=layout.group,
        interleaved=shape.interleaved and len(parts) == 2,
    )
    shares = bool(FORMATS[layout.format].scale_bytes)
    return replace(spec, lead=shape.inputs.start % spec.block if shape.inputs and shares else 0)


def block_inputs(spec: PackedSpec, shape: LinearShape) -> range:
    """The inputs of the blocks that hold this rank's, other ranks' included."""
    start = shape.inputs.start - spec.lead
    return range(start, min(start + spec.blocks * spec.block, shape.all_inputs))
