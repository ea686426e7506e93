"""Products of linear layers with adapters, on a GPU.

One row of 16-bit weights has the adapters' first product ahead and the second one within the layer's own (one_row.cuh),
and so have many rows of a gated product on Hopper (of_tiles.cuh). Others have the second product behind the layer's: it
is added to what is there, or, where an activation follows, to what is kept until then, in float32 where rows are so few
that the layer's kernel would round nothing before its activation. The first product comes ahead of kernels that ask for
their weight meanwhile, and behind those of cuBLAS, whose end the next kernel waits for anyway. Rows without an adapter
have the bits of the layer alone, but for gated products that are kept in 16 bits: by cuBLAS, of e4m3, and on Hopper of
more adapters than `of_tiles` takes; and for narrow ones of few rows on GPUs of less shared memory, where `skinny` may
have another number of warps for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.adapter_layout import panels_of
from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.cuda.adapters import of_tiles, one_row
from allspan.kernels.cuda.adapters.expand import expand, expand_gated
from allspan.kernels.cuda.adapters.shrink import shrink
from allspan.kernels.cuda.linear.call import ADD, GATED, STORE, LinearCall, Output
from allspan.kernels.cuda.linear.dispatch import choose
from allspan.kernels.cuda.linear.gemm import gemm_sm90
from allspan.kernels.cuda.linear.packed_linear import packed_linear, run
from allspan.kernels.fused_ops import AdapterMatrices, BaseProduct
from allspan.kernels.ops import Routing

_EPILOGUES = {"store": STORE, "add": ADD, **GATED}

_EXACT = ("gemv", "skinny", "skinny_shared", "skinny_sm90")
"""Kernels of few rows, which begin before the kernel ahead has ended, and round nothing before an activation."""


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
    if adapters.ranks.shape[1] != len(spec.parts) or adapters.panels.shape[1] != panels_of(spec.parts):
        raise ValueError(f"panels: {list(adapters.panels.shape)} are not of parts {list(spec.parts)}")
    call = LinearCall(x, weight, bias, spec, Output(out, 0, _EPILOGUES[epilogue]))
    kernel = choose(call).name
    if one_row.takes(kernel, call, adapters):
        one_row.run_with(call, adapters, routing)
        return
    matrices = AdapterWeights(*adapters[2:])
    if kernel == "gemm_sm90" and of_tiles.takes(matrices):
        sums = shrink(x, adapters.a, adapters.spec, routing)
        gemm_sm90.run_halves(call, of_tiles.tile_adapters(sums, matrices, routing))
        return
    is_exact = kernel in _EXACT
    ahead = shrink(x, adapters.a, adapters.spec, routing) if is_exact else None
    if epilogue not in GATED:
        run(call)
        sums = shrink(x, adapters.a, adapters.spec, routing) if ahead is None else ahead
        expand(sums, matrices, routing, out)
        return
    if is_exact:
        room = torch.empty(len(x), spec.features, device=x.device)
    if room is None:
        raise ValueError(f"room: there is none for the product before {epilogue}")
    packed_linear(x, weight, bias, spec, 0, room)
    sums = shrink(x, adapters.a, adapters.spec, routing) if ahead is None else ahead
    expand_gated(sums, matrices, routing, room, epilogue, out)
