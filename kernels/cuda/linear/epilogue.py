"""The pass behind a matrix product of cuBLAS: scales, bias, and what the op does with the outcome; see epilogue.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, gpu, kernel, launch
from allspan.kernels.cuda.linear.call import LinearCall, is_float
from allspan.kernels.cuda.linear.macros import BLOCKS_A_MULTIPROCESSOR

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

Factors = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Scales of the rows of x, float32 [n]; sums of their int8 values, float32 [n]; scales and offsets of the weight."""
NO_FACTORS: Factors = (None, None, None)


def finish(products: Tensor, call: LinearCall, factors: Factors = NO_FACTORS) -> None:
    """Writes the call's output from `products` [n, features]: of 16 bits, or int32 sums of int8 values."""
    spec, output = call.spec, call.output
    width, stride = output.width(spec), output.out.stride(0)
    together = 8 if width % 8 == output.column % 8 == stride % 8 == 0 else 1
    finish = _kernel(products.dtype, factors[0] is not None, together, output.out.dtype)
    sizes = (len(products), spec.features, output.epilogue, is_float(output.out), stride, output.column)
    across = -(-width // (256 * together))
    most = max(1, BLOCKS_A_MULTIPROCESSOR * gpu(products.device).multiprocessors // across)
    arguments = (products, *factors, call.bias, output.out, *map(np.int32, sizes))
    launch(finish, (across, min(-(-len(products) // 2), most)), 256, arguments, is_early=True)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        forms = (dtype, False), (torch.bfloat16, True), (torch.int32, True)
        yield from (_kernel(*form, width, dtype) for form in forms for width in (1, 8))
    yield _kernel(torch.bfloat16, False, 8, torch.float16)


def _kernel(products: torch.dtype, is_scaled: bool, width: int, out: torch.dtype) -> Kernel:
    """Returns the kernel from products in one type to an output in another, `width` features a thread."""
    from_codes = products == torch.int32
    form = {"BITS": 8, "FLOATS": int(not from_codes)} if is_scaled else {"BITS": 16}
    macros = {"FROM_CODES": int(from_codes), "SCALED": int(is_scaled and not from_codes), "WIDTH": width}
    if torch.float16 in (products, out):
        macros |= {"FP16": 1, "FROM_BF16": int(products == torch.bfloat16)}
    return kernel("linear/epilogue.cu", "finish", **form, **macros)
