"""A mixture of experts: each token goes through the gated MLPs that a router chooses, and through a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from allspan.kernels.ops import Routing
from allspan.kernels.router_spec import RouterSpec
from allspan.worker.models.pieces import EP, ETP, TP, Axis, Linear, Part, Piece, Vector
from allspan.worker.models.placement import table_rows
from allspan.worker.quant.base import GATED, Epilogue

EXPERT_LOAD, EXPERT_PLACES = "expert_load", "expert_places"
"""The labels of the counts of each expert's tokens, and of where the rank holds its copies (`Placement.table`)."""

if TYPE_CHECKING:
    from allspan.worker.models.sublayer import Sublayer
    from allspan.worker.program.program import Slot


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A gated MLP that every token goes through beside those chosen. Weights: shared_gate_up, shared_down, and where it
    `is_gated` shared_scale [1, H], by whose sigmoid its product is multiplied."""

    width: int
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class Moe:
    """An MlpBlock. Weights: router [E, H], with `has_choice_bias` router_bias [E], and with a leading dimension of
    experts expert_gate_up (gate and up stacked) and expert_down. Ranks share out whole experts, the columns of each, or
    both: see `allspan.worker.models.shard.make_shard`."""

    num_experts: int
    width: int
    """Columns of an expert."""
    router: RouterSpec
    shared: SharedExpert | None = None
    activation: str = "silu"
    """One of `allspan.kernels.ops.ACTIVATIONS`."""
    has_router_bias: bool = False
    has_choice_bias: bool = False
    has_bias: bool = False
    """Whether experts have biases."""

    @property
    def experts(self) -> Axis:
        return Axis(self.num_experts, group=EP)

    @property
    def columns(self) -> Axis:
        return Axis(self.width, group=ETP)

    def pieces(self, prefix: str, hidden: Axis) -> tuple[Piece, ...]:
        gate_up = Part(prefix + "expert_gate", self.columns), Part(prefix + "expert_up", self.columns)
        down = (Part(prefix + "expert_down", hidden),)
        router = (Part(prefix + "router", Axis(self.num_experts)),)
        made: list[Piece] = [Linear(prefix + "router", router, hidden, self.has_router_bias, is_exact=True)]
        if self.has_choice_bias:
            made.append(Vector(prefix + "router_bias.weight", Axis(self.num_experts)))
        made += [
            Linear(prefix + "expert_gate_up", gate_up, hidden, self.has_bias, is_gated=True, experts=self.experts),
            Linear(prefix + "expert_down", down, self.columns, self.has_bias, experts=self.experts),
        ]
        return (*made, *(() if self.shared is None else _shared_pieces(self.shared, prefix, hidden)))

    def emit(self, sub: Sublayer, x: Slot) -> None:
        """The shared expert's first product comes before that of the chosen ones: a GPU asks for weights before the
        kernel ahead has ended, and which these are is known before the choice."""
        routing, program, choices = self._route(sub, x), sub.program, self.router.top_k
        width = len(sub.shard.units(self.columns))
        chosen = program.view(sub.buffer("expert_mlp", choices * width), choices, width)
        shared = None if self.shared is None else self._shared(sub, x, self.shared)
        sub.experts("expert_gate_up").gated(x, self.activation, routing, chosen, choices)
        out = sub.target(sums_ranks=True)
        adds = out == sub.stream.residual
        if shared is not None:  # first: a product is added to float32 alone, the sum of experts to 16 bits, too
            sub.linear("shared_down", shared, out, Epilogue.ADD if adds else Epilogue.STORE)
        sub.experts("expert_down").sum(chosen, routing, adds or shared is not None, out)
        if not adds:
            sub.add(sums_ranks=True)

    def _shared(self, sub: Sublayer, x: Slot, shared: SharedExpert) -> Slot:
        """Appends the ops to what the shared expert's last layer reads, and returns its buffer."""
        mlp = sub.buffer("mlp", len(sub.shard.units(Axis(shared.width, group=TP))))
        sub.linear("shared_gate_up", x, mlp, GATED[self.activation])
        if shared.is_gated:
            scale = sub.buffer("shared_scale", 1, is_exact=True)
            sub.linear("shared_scale", x, scale)
            sub.program.op("scale_rows", mlp, scale)
        return mlp

    def _route(self, sub: Sublayer, x: Slot) -> Routing[Slot]:
        logits = sub.buffer("router_logits", self.num_experts, is_exact=True)
        sub.linear("router", x, logits)
        choices, placement = self.router.top_k, sub.placement(self.num_experts)
        group = sub.shard.groups[EP].rank
        routing = Routing(
            sub.buffer("expert_places", choices, is_integer=True),
            sub.buffer("expert_weights", choices, is_exact=True),
            sub.buffer("expert_slots", choices, is_integer=True),
            sub.single("expert_starts", len(placement.groups[group]) + 1),
        )
        bias = sub.weight("router_bias.weight") if self.has_choice_bias else None
        places = sub.state(EXPERT_PLACES, lambda: placement.table(group, table_rows(placement)))
        load = sub.state(EXPERT_LOAD, lambda: torch.zeros(self.num_experts, dtype=torch.int64))
        sub.program.op("route", logits, bias, places, self.router, routing, load, sub.row_numbers)
        return routing


def _shared_pieces(shared: SharedExpert, prefix: str, hidden: Axis) -> tuple[Piece, ...]:
    columns = Axis(shared.width, group=TP)
    gate_up = Part(prefix + "shared_gate", columns), Part(prefix + "shared_up", columns)
    scale = (Part(prefix + "shared_scale", Axis(1)),)
    return (
        Linear(prefix + "shared_gate_up", gate_up, hidden, is_gated=True),
        Linear(prefix + "shared_down", (Part(prefix + "shared_down", hidden),), columns),
        *((Linear(prefix + "shared_scale", scale, hidden, is_exact=True),) if shared.is_gated else ()),
    )
