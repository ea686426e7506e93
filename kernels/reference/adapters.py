"""Low-rank adapters in plain torch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from allspan.kernels.adapter_layout import rows_of
from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.fused_ops import AdapterMatrices, BaseProduct
from allspan.kernels.ops import Routing
from allspan.kernels.reference.elementwise import gated_mul
from allspan.kernels.reference.experts import expert_linear, slots_by_place, sort_slots
from allspan.kernels.reference.packed_linear import packed_linear, packed_linear_add


def route_adapters(adapters: Tensor, rows: Tensor | None, routing: Routing[Tensor]) -> None:
    """See `AdapterOps.route_adapters`."""
    chosen = (adapters if rows is None else adapters[rows.long()]).long()[:, None]
    num_places = routing.starts.shape[1] - 1
    is_there = (chosen >= 0) & (chosen < num_places)
    routing.places.copy_(torch.where(is_there, chosen, -1))
    routing.weights.fill_(1.0)
    sort_slots(torch.where(is_there, chosen, num_places), routing)


def embed_adapters(ids: Tensor, adapters: Tensor, weight: Tensor, first_row: int, out: Tensor) -> None:
    """See `AdapterOps.embed_adapters`."""
    num_places, count, width = weight.shape
    rows = ids.long() - first_row
    is_there = (rows >= 0) & (rows < count) & (adapters >= 0) & (adapters < num_places)
    places = torch.where(is_there, adapters.long() * count + rows, num_places * count)
    out.copy_(torch.cat((weight.reshape(-1, width), weight.new_zeros(1, width)))[places])


def add_adapters(x: Tensor, weights: AdapterWeights[Tensor], routing: Routing[Tensor], out: Tensor) -> None:
    """See `AdapterOps.add_adapters`."""
    ends, width = weights.ends.tolist(), weights.panels.shape[2]
    parts = [end - begin for begin, end in itertools.pairwise([0, *ends])]
    for place, rows in slots_by_place(routing):
        for part, end in enumerate(ends):
            rank = int(weights.ranks[place, part])
            own = x[rows, part * width : part * width + rank].double()
            found = own @ rows_of(weights.panels[place], parts, part)[:, :rank].double().T
            columns = slice(end - parts[part], end)
            out[rows, columns] = (out[rows, columns].float() + found.float()).to(out.dtype)


def adapted_linear(
    x: Tensor,
    adapters: AdapterMatrices[Tensor],
    routing: Routing[Tensor],
    base: BaseProduct[Tensor],
    room: Tensor | None,
    out: Tensor,
) -> None:
    """See `FusedOps.adapted_linear`."""
    low = torch.zeros(len(x), 1, adapters.spec.features, device=x.device)
    expert_linear(x, adapters.a, None, adapters.spec, 0, routing, low)
    weight, bias, spec, epilogue = base
    product = out if epilogue in ("store", "add") else torch.empty(len(x), spec.features, device=x.device)
    (packed_linear_add if epilogue == "add" else packed_linear)(x, weight, bias, spec, 0, product)
    add_adapters(low[:, 0], AdapterWeights(*adapters[2:]), routing, product)
    if product is not out:
        gated_mul(product, epilogue, out)
