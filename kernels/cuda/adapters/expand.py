"""The second product of low-rank adapters on a GPU, added to what is there or before an activation: expand.cu."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from allspan.kernels.adapter_layout import COLUMNS
from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.cuda.adapters.route import check_routing
from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.linear.call import GATED
from allspan.kernels.ops import Routing

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_UNIT, _MOST, _BLOCKS = 16, 8, 16
"""Rows that a block has at once; how often it goes on at most, where there are more blocks for a multiprocessor."""
_THREADS, _PANELS, _STAGES = 128, 2, 3
_MOST_LOW = 32 << 10
"""Bytes of sums of a tile's rows that a block keeps."""
_EXPANSION = struct.Struct("=9i")


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
        yield from (_kernel(dtype, way, other) for way in (0, *GATED.values()) for other in (dtype, torch.float32))


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
    columns = -(-(count // 2) // _PANELS) if is_gated else count // _PANELS + parts  # at most
    if n == 0 or count == 0:
        return
    device = gpu(out.device)
    halves, units = 1 + is_gated, -(-n // _UNIT)
    row_bytes = 8 + 4 * halves + 8 * (halves * -(-rank // 16) * 8 + 4)
    each = units * columns // (_BLOCKS * device.multiprocessors)
    each = _UNIT * max(1, min(_MOST, each, _MOST_LOW // (row_bytes * _UNIT)))
    blocks = columns, -(-n // each)
    stride = 0 if product is None else product.stride(0)
    sizes = _EXPANSION.pack(places, n, each, count, rank, parts, splits, out.stride(0), stride)
    wide = (out if product is None else product).element_size() // 2
    shared = each * row_bytes + _THREADS * _STAGES * halves * wide * 32
    if shared > device.shared_bytes:
        raise ValueError(
            f"ranks: adapters of rank {rank} take {shared} bytes of a thread block's shared memory, this GPU has "
            f"{device.shared_bytes}: lower max_lora_rank"
        )
    what = _kernel(panels.dtype, activation, out.dtype if product is None else product.dtype)
    arguments = (*weights, sums, routing.places, routing.slots, product, out, sizes)
    launch(what, blocks, _THREADS, arguments, shared, is_early=True)


def _kernel(dtype: torch.dtype, activation: int, other: torch.dtype) -> Kernel:
    """`other`: the type of out, or of a gated product."""
    macros = {"GATED": activation, "OUT_FLOATS": int(other == torch.float32)}
    return kernel("adapters/expand.cu", "expand", **macros, **element_macro(dtype))


def _check(sums: Tensor, weights: AdapterWeights[Tensor], routing: Routing[Tensor]) -> None:
    _, n, width = sums.shape
    if sums.dtype != torch.float32 or not sums.is_contiguous():
        raise ValueError(f"x: {sums.dtype} {[n, width]} is not float32")
    check_weights(n, width, weights, routing)


def check_weights(n: int, width: int, weights: AdapterWeights[Tensor], routing: Routing[Tensor]) -> None:
    """Raises ValueError unless these are second matrices for n rows of `width` sums."""
    panels, ranks, ends = weights
    places, parts = ranks.shape
    if panels.dtype not in HALVES or panels.ndim != 4 or len(panels) != places or panels.shape[3] != COLUMNS:
        raise ValueError(f"panels: {panels.dtype} {list(panels.shape)} is not of 16 bits [{places}, panels, R, 64]")
    for name, tensor, shape in (("ranks", ranks, (places, parts)), ("ends", ends, (parts,))):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} is not int32 {list(shape)}")
    if not panels.is_contiguous() or panels.data_ptr() % 16:
        raise ValueError("panels: they do not lie together, from a multiple of 16 bytes on")
    if width != parts * panels.shape[2]:
        raise ValueError(f"x: {[n, width]} is not [n, {parts * panels.shape[2]}]")
    check_routing(routing, n, places)
