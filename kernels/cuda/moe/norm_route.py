"""RMSNorm, a router's product and the choice of experts as one kernel, for one or two rows on sm_90 and later:
norm_route.cu. Others take three."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.moe.route import EACH, WARPS, check_route, packed_router, route
from allspan.kernels.cuda.moe.rows import linear
from allspan.kernels.cuda.rows.arguments import check
from allspan.kernels.cuda.rows.rms_norm import check_norm, rms_norm
from allspan.kernels.fused_ops import ExpertChoice, RouterProduct, RowNorm
from allspan.kernels.ops import Routing

LEAST_CAPABILITY = (9, 0)
"""See variants.py."""

_CLUSTER, _THREADS = 8, 512
"""Blocks, and threads of each."""
_MOST = 2
"""Rows times units, four elements of a row that a thread norms: with more, three kernels take less time."""


def norm_route(
    residual: Tensor,
    norm: RowNorm[Tensor],
    x: Tensor,
    product: RouterProduct[Tensor],
    choice: ExpertChoice[Tensor],
    routing: Routing[Tensor],
    load: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """See `FusedOps.norm_route`. Raises ValueError for what the kernels would read or write past."""
    n, width = x.shape
    form = _form(n, width)
    if form is None or not _fits(residual, norm, x, product):
        rms_norm(residual, norm.weight, norm.eps, x)
        linear(x, product.weight, product.bias, product.logits)
        route(product.logits, choice.bias, choice.places, choice.spec, routing, load, rows)
        return
    experts, num_places = len(product.weight), routing.starts.shape[1] - 1
    check("x", x, HALVES, (n, width))
    check_norm(x, residual, norm.weight)
    check("weight", product.weight, [torch.float32], (experts, width))
    if product.bias is not None:
        check("weight_bias", product.bias, [torch.float32], (experts,))
    check_route(product.logits, choice, routing, load, rows)
    each = next(each for each in EACH if experts <= 32 * each)
    router = packed_router(choice, experts)
    warps, top_k = _THREADS // 32, choice.spec.top_k
    of_choice = WARPS + 2 * num_places + n * top_k + warps * (4 * top_k + 32 * each)
    of_products = form[0] * max(32 * each // _CLUSTER, warps)
    shared = form[0] * width * 2 + 4 * (n * experts + of_products + of_choice)
    sizes = np.int32(n), np.int32(width), router, np.int32(num_places)
    given = (residual, norm.weight, np.float32(norm.eps), x, product.weight, product.bias, product.logits)
    written = routing.places, routing.weights, routing.slots, routing.starts
    arguments = (*given, choice.bias, choice.places, rows, load, *sizes, *written)
    launch(_kernel(each, form, x.dtype), (_CLUSTER,), _THREADS, arguments, shared, is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        for each in EACH[1:4]:
            for form in ((1, 1), (2, 1), (1, 2)):
                yield _kernel(each, form, dtype)


def _form(n: int, width: int) -> tuple[int, int] | None:
    """Returns the most rows and the units of a thread that the kernel is compiled with; None: there are too many."""
    units = -(-width // (4 * _THREADS))
    rows = 1 << max(n - 1, 0).bit_length()
    return (rows, units) if n > 0 and rows * units <= _MOST else None


def _fits(residual: Tensor, norm: RowNorm[Tensor], x: Tensor, product: RouterProduct[Tensor]) -> bool:
    """Whether the kernel takes tensors of these types and places."""
    floats = residual, norm.weight, product.weight, product.logits
    is_float = all(each.dtype == torch.float32 for each in floats) and x.dtype in HALVES
    is_aligned = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (*floats, x))
    return is_float and is_aligned and x.shape[1] % 4 == 0 and gpu(x.device).capability >= LEAST_CAPABILITY


def _kernel(each: int, form: tuple[int, int], dtype: torch.dtype) -> Kernel:
    sizes = {"EACH": each, "CLUSTER": _CLUSTER, "ROWS": form[0], "UNITS": form[1]}
    return kernel("moe/norm_route.cu", "norm_route", **sizes, **element_macro(dtype))
