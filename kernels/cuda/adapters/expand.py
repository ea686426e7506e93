"""The second product of low-rank adapters on a GPU, added to what is there or before an activation: expand.cu."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from allspan.kernels.adapter_layout import COLUMNS
from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.cuda.adapters.route import check_routing
from allspan.kernels.cuda.adapters.shrink import most_tiles
from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.linear.call import GATED
from allspan.kernels.ops import Routing

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_ROWS = 4
"""Rows that a thread has at once."""
_LEAST, _MOST, _WAVES = 8, 64, 4
"""Rows of a tile: as many as leave so many thread blocks for each multiprocessor."""
_FEW_ROWS = 256
"""Rows from which on tensor cores multiply, for whom a tile has a multiple of 16."""
_THREADS, _RANKS = 128, 16
_MOST_LOW = 32 << 10
"""Bytes of sums of a tile's rows that a block keeps."""
_EXPANSION = struct.Struct("=10i")


def add_adapters(x: Tensor, weights: AdapterWeights[Tensor], routing: Routing[Tensor], out: Tensor) -> None:
    """See `AdapterOps.add_adapters`; out is float32 or of 16 bits."""
    expand(x.float()[None], weights, routing, out)


def expand(sums: Tensor, weights: AdapterWeights[Tensor], routing: Routing[Tensor], out: Tensor) -> None:
    """out[row] += Σ of sums[:, row] · bᵀ, part by part, in rows that have a place. sums float32 [splits, n, parts · R]:
    see `shrink`."""
    _check(sums, weights, routing)
    if out.dtype not in (torch.float32, weights.panels.dtype) or len(out) != sums.shape[1] or out.stride(1) != 1:
        raise ValueError(f"out: {out.dtype} {list(out.shape)} does not take {sums.shape[1]} rows")
    _launch(sums, weights, routing, None, 0, out)


def expand_gated(
    sums: Tensor,
    weights: AdapterWeights[Tensor],
    routing: Routing[Tensor],
    product: Tensor,
    activation: str,
    out: Tensor,
) -> None:
    """out = `gated_mul` of product and what `expand` would add to it, whose sum is not rounded, in all rows. product
    [n, 2 · I], float32 or of 16 bits; out [n, I] of 16 bits."""
    _check(sums, weights, routing)
    n, width = out.shape
    if weights.ranks.shape[1] != 2 or weights.panels.shape[1] != 2 * -(-width // COLUMNS):
        raise ValueError(f"panels: {list(weights.panels.shape)} are not of two parts of {width} columns")
    if product.dtype not in (torch.float32, out.dtype) or tuple(product.shape) != (n, 2 * width):
        raise ValueError(f"product: {product.dtype} {list(product.shape)} is not [{n}, {2 * width}]")
    if out.dtype != weights.panels.dtype or n != sums.shape[1] or out.stride(1) != 1 or product.stride(1) != 1:
        raise ValueError(f"out: {out.dtype} {list(out.shape)} does not take {sums.shape[1]} rows")
    _launch(sums, weights, routing, product, GATED[activation], out)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        for other in (dtype, torch.float32):
            forms = itertools.product((False, True), (False, True))
            yield from (_kernel(dtype, is_gated, other, has_many) for is_gated, has_many in forms)


def _launch(
    sums: Tensor,
    weights: AdapterWeights[Tensor],
    routing: Routing[Tensor],
    product: Tensor | None,
    activation: int,
    out: Tensor,
) -> None:
    panels, (splits, n, _) = weights.panels, sums.shape
    (places, count, rank, _), parts = panels.shape, weights.ranks.shape[1]
    is_gated = product is not None
    columns = -(-(count // 2 if is_gated else count) * (COLUMNS // 8) // _THREADS)
    if n == 0 or columns == 0:
        return
    device = gpu(out.device)
    has_many = n > _FEW_ROWS
    unit = 16 if has_many else _ROWS
    row_bytes = 4 + 4 * parts * (-(-rank // 16) * 16 if has_many else rank + rank % 2)
    each = max(_LEAST, min(_MOST, n * columns // (_WAVES * device.multiprocessors)))
    each = max(unit, min(each, _MOST_LOW // row_bytes) // unit * unit)
    most = -(-2 * _WAVES * device.multiprocessors // columns)
    blocks = columns, min(most, most_tiles(n, places + is_gated, each))
    stride = 0 if product is None else product.stride(0)
    sizes = _EXPANSION.pack(places, n, each, count, rank, parts, splits, out.stride(0), stride, activation)
    shared = each * row_bytes + (0 if has_many else (1 + is_gated) * _RANKS * _THREADS * 16)
    if shared > device.shared_bytes:
        raise ValueError(f"ranks: {parts} parts of a layer are more than a thread block of this GPU takes")
    what = _kernel(panels.dtype, is_gated, out.dtype if product is None else product.dtype, has_many)
    arguments = (*weights, sums, routing.starts, routing.slots, product, out, sizes)
    launch(what, blocks, _THREADS, arguments, shared, is_early=True)


def _kernel(dtype: torch.dtype, is_gated: bool, other: torch.dtype, has_many: bool) -> Kernel:
    """`other`: the type of out, or of a gated product."""
    name = "expand_many" if has_many else "expand"
    macros = {"ROWS": _ROWS, "GATED": int(is_gated), "OUT_FLOATS": int(other == torch.float32)}
    return kernel("adapters/expand.cu", name, **macros, **element_macro(dtype))


def _check(sums: Tensor, weights: AdapterWeights[Tensor], routing: Routing[Tensor]) -> None:
    panels, ranks, ends = weights
    places, parts = ranks.shape
    if panels.dtype not in HALVES or panels.ndim != 4 or len(panels) != places or panels.shape[3] != COLUMNS:
        raise ValueError(f"panels: {panels.dtype} {list(panels.shape)} is not of 16 bits [{places}, panels, R, 64]")
    for name, tensor, shape in (("ranks", ranks, (places, parts)), ("ends", ends, (parts,))):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} is not int32 {list(shape)}")
    _, n, width = sums.shape
    if not panels.is_contiguous() or panels.data_ptr() % 16:
        raise ValueError("panels: they do not lie together, from a multiple of 16 bytes on")
    if sums.dtype != torch.float32 or width != parts * panels.shape[2] or not sums.is_contiguous():
        raise ValueError(f"x: {sums.dtype} {[n, width]} is not float32 [n, {parts * panels.shape[2]}]")
    check_routing(routing, n, places)
