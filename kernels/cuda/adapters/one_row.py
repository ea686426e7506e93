"""The second product of a low-rank adapter within the product of its layer, of one row on a GPU: one_row.cuh."""

from __future__ import annotations

import struct
from dataclasses import replace

from torch import Tensor

from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.cuda.adapters.expand import check_weights
from allspan.kernels.cuda.adapters.shrink import shrink, splits_of
from allspan.kernels.cuda.linear.call import LinearCall, OneRowAdapter
from allspan.kernels.cuda.linear.gemm import skinny
from allspan.kernels.cuda.linear.packed_linear import run
from allspan.kernels.fused_ops import AdapterMatrices
from allspan.kernels.ops import Routing

_ONE_ROW = struct.Struct("=5Q5i4x")


def takes(kernel: str, call: LinearCall, adapters: AdapterMatrices[Tensor]) -> bool:
    """Whether this kernel of the call's product has the second product within."""
    sums = adapters.ranks.shape[1] * splits_of(call.rows, adapters.spec, call.gpu)
    return kernel == "skinny" and skinny.takes_adapter(call, OneRowAdapter(b"", sums))


def run_with(call: LinearCall, adapters: AdapterMatrices[Tensor], routing: Routing[Tensor]) -> None:
    """The call with what adapters add to its product, before bias and epilogue; see `takes`. Raises ValueError for what
    the kernels would read or write past."""
    a, spec, panels, ranks, ends = adapters
    sums = shrink(call.x, a, spec, routing)
    splits, n, width = sums.shape
    check_weights(n, width, AdapterWeights(panels, ranks, ends), routing)
    pointers = (each.data_ptr() for each in (panels, ranks, ends, routing.places, sums))
    places, parts = ranks.shape
    argument = _ONE_ROW.pack(*pointers, places, panels.shape[1], panels.shape[2], parts, splits)
    run(replace(call, adapter=OneRowAdapter(argument, parts * splits)))
