"""Products of linear layers with adapters, on a GPU: a layer's own product between or behind those of its adapters.

The adapters' first product comes before the layer's own, which asks for its weight meanwhile. A product that is added
to the residual stream comes last: what adapters add is there already. One whose activation follows is kept, and the
adapters' second product does the rest: in float32 where rows are so few that the layer's kernel would round nothing
before its activation, so that rows without an adapter have the bits of the layer alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.cuda.adapters.expand import expand, expand_gated
from allspan.kernels.cuda.adapters.shrink import shrink
from allspan.kernels.cuda.linear.call import GATED, LinearCall, Output
from allspan.kernels.cuda.linear.dispatch import choose
from allspan.kernels.cuda.linear.packed_linear import packed_linear, packed_linear_add
from allspan.kernels.fused_ops import AdapterMatrices, BaseProduct
from allspan.kernels.ops import Routing

_EXACT = ("gemv", "skinny", "skinny_shared", "skinny_sm90")
"""Kernels of few rows that round nothing before an activation."""


def adapted_linear(
    x: Tensor,
    adapters: AdapterMatrices[Tensor],
    routing: Routing[Tensor],
    base: BaseProduct[Tensor],
    room: Tensor | None,
    out: Tensor,
) -> None:
    """See `FusedOps.adapted_linear`. Raises ValueError for what the kernels would read or write past."""
    weight, bias, spec, epilogue = base
    matrices = AdapterWeights(*adapters[2:])
    sums = shrink(x, adapters.a, adapters.spec, routing)
    if epilogue == "store":
        packed_linear(x, weight, bias, spec, 0, out)
        expand(sums, matrices, routing, out)
    elif epilogue == "add":
        expand(sums, matrices, routing, out)
        packed_linear_add(x, weight, bias, spec, 0, out)
    else:
        if choose(LinearCall(x, weight, bias, spec, Output(out, 0, GATED[epilogue]))).name in _EXACT:
            room = torch.empty(len(x), spec.features, device=x.device)
        if room is None:
            raise ValueError(f"room: there is none for the product before {epilogue}")
        packed_linear(x, weight, bias, spec, 0, room)
        expand_gated(sums, matrices, routing, room, epilogue, out)
