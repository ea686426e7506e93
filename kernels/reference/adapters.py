"""Low-rank adapters in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.reference.experts import slots_by_place, sort_slots
from allspan.kernels.reference.packed_linear import unpack


def route_adapters(adapters: Tensor, rows: Tensor | None, routing: Routing[Tensor]) -> None:
    """See `AdapterOps.route_adapters`."""
    chosen = (adapters if rows is None else adapters[rows.long()]).long()[:, None]
    num_places = routing.starts.shape[1] - 1
    is_there = (chosen >= 0) & (chosen < num_places)
    routing.places.copy_(torch.where(is_there, chosen, -1))
    routing.weights.fill_(1.0)
    sort_slots(torch.where(is_there, chosen, num_places), routing)


def add_adapters(x: Tensor, weight: Tensor, spec: PackedSpec, routing: Routing[Tensor], out: Tensor) -> None:
    """See `AdapterOps.add_adapters`."""
    for place, rows in slots_by_place(routing):
        parts = torch.split(unpack(weight[place], spec), list(spec.parts))
        own = x[rows].double().view(len(rows), len(parts), spec.inputs)
        found = [own[:, p] @ part.double().T for p, part in enumerate(parts)]
        out[rows] = (out[rows].float() + torch.cat(found, 1).float()).to(out.dtype)
