"""The gated MLP of Llama: down(activation(gate(x)) · up(x))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from allspan.worker.models.pieces import TP, Axis, Linear, Part, Piece
from allspan.worker.quant.base import GATED

if TYPE_CHECKING:
    from allspan.worker.models.sublayer import Sublayer
    from allspan.worker.program.program import Slot


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """An MlpBlock. Weights: gate_up (gate and up stacked) and down."""

    intermediate_size: int
    bias: bool = False
    activation: str = "silu"
    """One of `allspan.kernels.ops.ACTIVATIONS`."""

    def pieces(self, prefix: str, hidden: Axis) -> tuple[Piece, ...]:
        columns = Axis(self.intermediate_size, group=TP)
        gate_up = Part(prefix + "gate", columns), Part(prefix + "up", columns)
        return (
            Linear(prefix + "gate_up", gate_up, hidden, self.bias, is_gated=True),
            Linear(prefix + "down", (Part(prefix + "down", hidden),), columns, self.bias),
        )

    def emit(self, sub: Sublayer, x: Slot) -> None:
        gated = sub.buffer("mlp", len(sub.shard.units(Axis(self.intermediate_size, group=TP))))
        sub.linear("gate_up", x, gated, GATED[self.activation])
        sub.add_linear("down", gated)
