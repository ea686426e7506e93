"""Ops of mixtures of experts that multiply with no expert's weight, on a GPU: rows.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.linear.call import GATED
from allspan.kernels.cuda.linear.macros import BLOCKS_A_MULTIPROCESSOR
from allspan.kernels.cuda.moe import split_linear
from allspan.kernels.cuda.rows.arguments import FLOATS, check
from allspan.kernels.ops import ACTIVATIONS, Routing
from allspan.kernels.reference.linear import linear as reference_linear

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_THREADS, _ROWS_TOGETHER = 256, 8
_MOST_EXACT_ROWS = 64
"""Rows from which on a matrix product of cuBLAS takes less time."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See `OpSet.linear`; weights in float32 meet x in 16 bits exactly. Without a kernel it is torch's own product."""
    n, inputs = x.shape
    if n > _MOST_EXACT_ROWS and split_linear.takes(x, weight, out):
        split_linear.linear(x, weight, bias, out)
        return
    is_exact = weight.dtype == out.dtype == torch.float32 and x.dtype in HALVES and inputs % 4 == 0
    is_exact = is_exact and out.is_contiguous() and x.is_contiguous() and x.data_ptr() % 8 == 0
    if not is_exact or not 0 < n <= _MOST_EXACT_ROWS or weight.data_ptr() % 16:
        reference_linear(x, weight, bias, out)
        return
    blocks = len(weight), -(-n // _ROWS_TOGETHER)
    arguments = (x, weight, bias, out, np.int32(n), np.int32(inputs))
    launch(_kernel("exact_linear", torch.float32, x.dtype), blocks, 128, arguments, is_early=True)


def scale_rows(x: Tensor, logits: Tensor) -> None:
    """See `OpSet.scale_rows`."""
    n, width = x.shape
    check("x", x, FLOATS, (n, width))
    check("logits", logits, [torch.float32], (n, 1))
    if x.numel():
        _launch("scale_rows", x, x.dtype, x.numel(), (x, logits, np.int64(n), np.int32(width)))


def expert_gather(x: Tensor, columns: Tensor, routing: Routing[Tensor], out: Tensor) -> None:
    """See `OpSet.expert_gather`; x and out are of one type of 16 bits."""
    n, top_k, width = out.shape
    check("x", x, HALVES, (n, width) if x.dim() == 2 else (n, top_k, width))
    check("columns", columns, [torch.int32], (routing.starts.shape[1] - 1, width))
    check("out", out, [x.dtype], (n, top_k, width))
    check("routing.places", routing.places, [torch.int32], (n, top_k))
    if out.numel():
        sizes = np.int64(n * top_k), np.int32(width), np.int32(top_k if x.dim() == 2 else 1)
        _launch("gather_slots", out, x.dtype, out.numel(), (x, columns, routing.places, out, *sizes))


def expert_gated_mul(gate_up: Tensor, activation: str, routing: Routing[Tensor], out: Tensor) -> None:
    """See `OpSet.expert_gated_mul`."""
    n, top_k, width = out.shape
    check("gate_up", gate_up, HALVES, (n, top_k, 2 * width))
    check("out", out, (torch.float32, gate_up.dtype), (n, top_k, width))
    check("routing.places", routing.places, [torch.int32], (n, top_k))
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is none of {', '.join(ACTIVATIONS)}")
    if out.numel():
        sizes = np.int64(n * top_k), np.int32(width), np.int32(GATED[activation])
        _launch("gated_slots", out, gate_up.dtype, out.numel(), (gate_up, routing.places, out, *sizes))


def sum_choices(products: Tensor, routing: Routing[Tensor], adds: bool, out: Tensor, dtype: torch.dtype) -> None:
    """out[n, N] (or += if it `adds`) the weighted sums of products [n, k, N] over the choices that have a place, in
    their order. products: float32, N a multiple of 4, or `dtype`, that of 16-bit elements, N a multiple of 8, and rows
    of out begin at multiples of 16 bytes."""
    n, top_k, width = products.shape
    sizes = map(np.int32, (n, top_k, width, out.stride(0), adds))
    arguments = (products, routing.places, routing.weights, out, *sizes)
    if products.dtype == torch.float32:
        _launch("sum_choices", out, dtype, n * width // 4, arguments)
    else:
        _launch("sum_halves", out, dtype, n * width // 8, arguments)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        for out in (torch.float32, dtype):
            for name in ("sum_choices", "sum_halves", "gated_slots", "scale_rows"):
                yield _kernel(name, out, dtype)
        yield _kernel("gather_slots", dtype, dtype)
        yield _kernel("exact_linear", torch.float32, dtype)


def _launch(name: str, out: Tensor, dtype: torch.dtype, units: int, arguments: tuple[object, ...]) -> None:
    most = BLOCKS_A_MULTIPROCESSOR * gpu(out.device).multiprocessors
    blocks = max(1, min(-(-units // _THREADS), most))
    launch(_kernel(name, out.dtype, dtype), (blocks,), _THREADS, arguments, is_early=True)


def _kernel(name: str, out: torch.dtype, dtype: torch.dtype) -> Kernel:
    macros = element_macro(out if dtype == torch.float32 else dtype)
    return kernel("moe/rows.cu", name, OUT_FLOATS=int(out == torch.float32), **macros)
