"""What the methods share whose weights are packed: `allspan.kernels.packed_spec` has the layouts."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from allspan.kernels.packed_spec import FEATURES, PackedSpec
from allspan.kernels.packer import Packer, Target
from allspan.worker.program.program import ProgramBuilder, Slot
from allspan.worker.quant.base import Epilogue, LinearShape, Source
from allspan.worker.weights.held_tensor import HeldTensor

_CHUNK = {"panels": 1 << 20, "rows": 1 << 23}
"""Elements that are read at a time, by how packed weights lie: bounds the temporaries, and keeps those of panels near
the processor; a GPU packs rows by a few dozen launches, whatever their number."""

_OPS = {Epilogue.STORE: "packed_linear", Epilogue.ADD: "packed_linear_add"}


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A packed weight of a layer: all of it, or neighbouring parts that are held alike."""

    number: str
    """Behind "weight" and "bias" in the names of its tensors: empty, or ".0", ".1" … where there are several."""
    spec: PackedSpec
    first_part: int
    column: int
    """The first of the layer's outputs that it has."""
    is_ordered: bool = False
    """Whether its inputs are in an order of their own."""

    @property
    def weight(self) -> str:
        return f"weight{self.number}"

    @property
    def bias(self) -> str:
        return f"bias{self.number}"

    @property
    def order(self) -> str:
        return f"order{self.number}"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a part is to be packed."""

    format: str
    activation: str
    group: int = 0
    order: str = ""
    """In which inputs are held, if not as they come: parts that are alike have the same."""


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
            number = "" if len(runs) == 1 else f".{len(held)}"
            spec, column = packed_spec(layout, shape, parts), sum(shape.parts[:first])
            held.append(PackedPart(number, spec, first, column, bool(layout.order)))
            first += count
        return tuple(held)

    def tensors(self, shape: LinearShape) -> dict[str, HeldTensor]:
        held: dict[str, HeldTensor] = {}
        for part in self.packed(shape):
            held[part.weight] = HeldTensor(part.spec.shape, torch.uint8)
            if shape.has_bias:
                held[part.bias] = HeldTensor((part.spec.features,), torch.float32)
            if part.is_ordered:
                held[part.order] = HeldTensor((part.spec.inputs,), torch.int32)
        return held

    def load(self, shape: LinearShape, source: Source, held: Mapping[str, Tensor], packer: Packer) -> None:
        for packed in self.packed(shape):
            parts = packed.spec.parts
            if shape.has_bias:
                for part, out in enumerate(torch.split(held[packed.bias], list(parts)), packed.first_part):
                    source.bias(part, out)
            if packed.is_ordered:
                held[packed.order].copy_(source.order(packed.first_part))
            step = _CHUNK[shape.memory] // max(1, shape.all_inputs) // FEATURES * FEATURES or FEATURES
            for number, size in enumerate(parts if shape.inputs else ()):
                for start in range(0, size, step):
                    target = Target(packed.spec, number, start, held[packed.weight])
                    rows = range(start, min(size, start + step))
                    self.fill(shape, Chunk(packed.first_part + number, rows, target), source, packer)

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
        alone = len(packed) == 1
        product = out if alone or epilogue is Epilogue.STORE else program.scratch("product", out, shape.outputs)
        for part in packed:
            op = _OPS.get(epilogue, "packed_gated_linear") if alone else "packed_linear"
            activation = (epilogue.activation,) if alone and epilogue.activation else ()
            bias = weights[part.bias] if shape.has_bias else None
            seen = x
            if part.is_ordered:
                seen = program.scratch("ordered", x, part.spec.inputs)
                program.op("gather_columns", x, weights[part.order], seen)
            program.op(op, seen, weights[part.weight], bias, part.spec, part.column, *activation, product)
        if product is not out:
            epilogue.finish(program, product, out)

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
        program.op("packed_embedding", ids, weights[packed.weight], packed.spec, first_row, out)


def packed_spec(layout: Layout, shape: LinearShape, parts: Sequence[int]) -> PackedSpec:
    """Returns the layout of neighbouring parts of a layer that are held alike."""
    spec = PackedSpec(
        layout.format,
        layout.activation,
        tuple(parts),
        len(shape.inputs),
        group=layout.group,
        interleaved=shape.interleaved and len(parts) == 2 and shape.memory == "panels",
        memory=shape.memory,
    )
    shares = bool(spec.kind.scale_bytes)
    return replace(spec, k_offset=shape.inputs.start % spec.block if shape.inputs and shares else 0)


def block_inputs(spec: PackedSpec, shape: LinearShape) -> range:
    """The inputs of the blocks that hold this rank's, other ranks' included."""
    start = shape.inputs.start - spec.k_offset
    return range(start, min(start + spec.blocks * spec.block, shape.all_inputs))
