"""The ops of layers of which every expert has one: what `LinearMethod.emit` is for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from allspan.kernels.ops import Routing
from allspan.worker.program.program import ProgramBuilder, Slot
from allspan.worker.quant.base import LinearShape
from allspan.worker.quant.packed import PackedPart


@runtime_checkable
class Packs(Protocol):
    """A method whose weights are packed, see `allspan.worker.quant.packed.PackedMethod.packed`."""

    def packed(self, shape: LinearShape) -> tuple[PackedPart, ...]: ...


class ExpertProducts:
    """One layer of the experts that a rank holds, all held by one method."""

    def __init__(self, program: ProgramBuilder, method: Packs, shape: LinearShape, weights: Mapping[str, Slot]) -> None:
        """`weights` are the slots of the held tensors, by suffix, with a leading dimension of places."""
        self._program, self._shape, self._weights = program, shape, weights
        self._packed = method.packed(shape)

    def gated(self, x: Slot, activation: str, routing: Routing[Slot], out: Slot, choices: int) -> None:
        """Appends the ops of out[n, k, I] = activation(gate(x)) · up(x) of every choice. Parts that are held in
        different formats are products of their own."""
        program, width = self._program, self._shape.parts[0]
        if len(self._packed) == 1:
            (part,) = self._packed
            weight, bias = self._of(0)
            seen = self._ordered(part, x, routing, choices)
            program.op("expert_gated_linear", seen, weight, bias, part.spec, activation, routing, out)
            return
        both = program.view(program.scratch("expert product", x, choices * 2 * width), choices, 2 * width)
        for number, part in enumerate(self._packed):
            weight, bias = self._of(number)
            seen = self._ordered(part, x, routing, choices)
            program.op("expert_linear", seen, weight, bias, part.spec, part.column, routing, both)
        program.op("expert_gated_mul", both, activation, routing, out)

    def sum(self, x: Slot, routing: Routing[Slot], adds: bool, out: Slot) -> None:
        """Appends the op of out[n, H] = (or += if it `adds`) the weighted sum of the products of x[n, k, I] over the
        choices."""
        (part,) = self._packed
        weight, bias = self._of(0)
        x = self._ordered(part, x, routing, self._program.width(x) // max(1, part.spec.inputs))
        self._program.op("expert_sum", x, weight, bias, part.spec, routing, adds, out)

    def _ordered(self, part: PackedPart, x: Slot, routing: Routing[Slot], choices: int) -> Slot:
        """What the part's products read: x, or a row for each choice with its inputs in the expert's order."""
        if not part.is_ordered:
            return x
        program, width = self._program, part.spec.inputs
        ordered = program.view(program.scratch("ordered choices", x, choices * width), choices, width)
        program.op("expert_gather", x, self._weights[part.order], routing, ordered)
        return ordered

    def _of(self, number: int) -> tuple[Slot, Slot | None]:
        part = self._packed[number]
        return self._weights[part.weight], self._weights.get(part.bias)
