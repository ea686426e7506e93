"""Products with packed weights in rows (`allspan.kernels.rows`), for models of 16 bits: see
`allspan.kernels.ops.OpSet`.

x is bfloat16 or float16 [n, K]; out is of its type, or float32 (logits, and what `packed_linear_add` adds to), and so
are weights of 16 bits and what codes become. Sums are float32.

- Few rows (`skinny.py`): kernels that read the weight once, at the speed of memory; codes meet x as it is, whatever the
  spec's activation: at these sizes rounding x would save nothing.
- Many: cuBLAS, through torch, or on Hopper `gemm_sm90.py`, where that is faster. Codes become x's type first; but with
  scales a channel and activation a8 or e4m3, x becomes int8 or e4m3 (sm_89 and later), with a scale a row, and codes
  are multiplied as they are. So are those of fp8_block on Hopper (with cuBLAS 12.9 or later), and x has a scale for
  each 128 inputs. Products of e4m3 come in bfloat16, which has the range that they need before they meet scales.

So a row's bits depend on how many come with it, unlike on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch
from allspan.kernels.cuda.linear.gemm_sm90 import Scales, gemm_sm90, pays
from allspan.kernels.cuda.linear.products import (
    ADD,
    GATED,
    STORE,
    Into,
    bits_of,
    common_specs,
    group_sets,
    groups,
    is_float,
    slabs,
)
from allspan.kernels.cuda.linear.skinny import few_rows, is_few, multiplies_e4m3
from allspan.kernels.packed import PackedSpec
from allspan.kernels.rows import FLOATS, codes_of, numbers_of

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_ROWS_TOGETHER = 8
"""Scales of rows of x lie side by side, and cuBLAS reads them 16 bytes at a time."""

_ELEMENTWISE_BLOCKS = 16
"""Of a multiprocessor, for kernels that go through a tensor once."""
_HELD_ROW = 20_480
"""Elements of a row that a block keeps while it looks for the largest: 40 KB, for six blocks a multiprocessor."""


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor) -> None:
    """See `OpSet.packed_linear`. Raises ValueError for what the kernels would read or write past."""
    _product(x, weight, bias, spec, Into(out, column, STORE))


def packed_linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor
) -> None:
    """See `OpSet.packed_linear_add`; out is float32."""
    _product(x, weight, bias, spec, Into(out, column, ADD))


def packed_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor
) -> None:
    """See `OpSet.packed_gated_linear`."""
    _product(x, weight, bias, spec, Into(out, column, GATED))


def packed_embedding(ids: Tensor, weight: Tensor, spec: PackedSpec, first_row: int, out: Tensor) -> None:
    """See `OpSet.packed_embedding`; out is float32 or of 16 bits."""
    _check_weight(weight, spec)
    if ids.dtype != torch.int32 or out.shape != (len(ids), spec.inputs) or not out.is_contiguous():
        raise ValueError(f"out: {list(out.shape)} is not {spec.inputs} of each of {len(ids)} ids ({ids.dtype})")
    dtypes = torch.float32, *([FLOATS[spec.format]] if spec.format in FLOATS else HALVES)
    if out.dtype not in dtypes:
        raise ValueError(f"out: {out.dtype} is none of {', '.join(map(str, dtypes))}, which {spec.format} rows become")
    if len(ids) == 0 or spec.inputs == 0:
        return
    sizes = (*groups(spec), spec.inputs, slabs(spec), spec.lead, first_row, is_float(out))
    arguments = (ids, weight, numbers_of(weight, spec), out, np.int32(spec.features), *map(np.int32, sizes))
    launch(_codes("embed", spec, FLOATS.get(spec.format, out.dtype)), (len(ids),), 128, arguments)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    _check(x, weight, bias, spec, into)
    if len(x) == 0 or spec.features == 0:
        return
    if is_few(len(x), spec, gpu(x.device)) or spec.inputs == 0:
        few_rows(_aligned(x, spec), weight, bias, spec, into)
    elif spec.activation == "a8" and spec.format == "channel8" and spec.features % 8 == 0:
        _of_codes(_aligned(x, spec), weight, bias, spec, into)
    elif spec.format == "fp8" and spec.features % 16 == 0 and multiplies_e4m3(spec, gpu(x.device)):
        _of_e4m3(_aligned(x, spec), weight, bias, spec, into)
    elif spec.format == "fp8_block" and _multiplies_blocks(x, spec):
        _of_blocks(_aligned(x, spec), weight, bias, spec, into)
    else:
        matrix = codes_of(weight, spec) if spec.kind.bits == 16 else _dequantised(weight, spec, x.dtype)
        _of_floats(x, matrix[:, spec.lead : spec.lead + spec.inputs], bias, spec, into)


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    for dtype in HALVES:
        for spec in common_specs(dtype):
            yield from (_codes(function, spec, dtype) for function in ("embed", "dequantise"))
        yield from (_quantise_kernel("quantise", floats, dtype) for floats in (0, 1))
        yield _quantise_kernel("quantise_groups", 1, dtype)
        forms = (dtype, False), (torch.bfloat16, True), (torch.int32, True)
        yield from (_finish_kernel(*form, width, dtype) for form in forms for width in (1, 8))
    yield _finish_kernel(torch.bfloat16, False, 8, torch.float16)


def _of_floats(x: Tensor, matrix: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    """`matrix` of x's type [features, inputs]."""
    view = into.view(spec)
    if pays(x, matrix, view, into.epilogue):
        gemm_sm90(x, matrix, None, bias, view, into.epilogue)
    elif into.epilogue == GATED or (bias is not None and is_float(into.out)):
        _finish(torch.mm(x, matrix.T), bias, spec, into)
    elif bias is not None:
        torch.addmm(_rounded(bias, x.dtype), x, matrix.T, out=view)
    elif not is_float(into.out):
        torch.mm(x, matrix.T, out=view)
    elif x.is_cuda:
        if into.epilogue == ADD:
            torch.addmm(view, x, matrix.T, out_dtype=torch.float32, out=view)
        else:
            torch.mm(x, matrix.T, out_dtype=torch.float32, out=view)
    else:
        product = x.float() @ matrix.float().T
        view.copy_(product + view if into.epilogue == ADD else product)


def _rounded(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """As cuBLAS adds it: made once for each content of a bias, in one place as long as the bias lives, so that a
    captured graph sees what a later call outside made of a bias that was written to. While a graph is captured that
    has none yet, it is made within the graph."""
    if bias.is_inference():  # nothing counts what is written to it
        return bias.to(dtype)
    held = _ROUNDED.setdefault(bias, {})
    state = bias.data_ptr(), bias._version
    made, rounded = held.get(dtype, (None, None))
    if rounded is not None and made == state:
        return rounded
    if bias.is_cuda and torch.cuda.is_current_stream_capturing():
        return bias.to(dtype)
    if rounded is None or rounded.shape != bias.shape or rounded.device != bias.device:
        rounded = bias.to(dtype)
    else:
        rounded.copy_(bias)
    held[dtype] = state, rounded
    return rounded


_ROUNDED: MutableMapping[Tensor, dict[torch.dtype, tuple[tuple[int, int], Tensor]]] = WeakTensorKeyDictionary()


def _of_codes(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    """Whole numbers of 8 bits on both sides; both in a slab's order."""
    codes, scales, sums = _quantised(x, spec, torch.int8)
    products = torch._int_mm(codes, codes_of(weight, spec).view(torch.int8).T)
    _finish(products, bias, spec, into, (scales, sums, numbers_of(weight, spec)))


def _of_e4m3(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    """e4m3 numbers on both sides, in a slab's order."""
    codes, scales, _ = _quantised(x, spec, torch.float8_e4m3fn)
    matrix, view = codes_of(weight, spec).view(torch.float8_e4m3fn), into.view(spec)
    if pays(codes, matrix, view, into.epilogue):
        gemm_sm90(codes, matrix, Scales(scales, numbers_of(weight, spec)[0]), bias, view, into.epilogue)
        return
    if x.is_cuda:
        one = _one(x.device)
        products = torch._scaled_mm(codes, matrix.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        products = (codes.float() @ matrix.T.float()).bfloat16()
    _finish(products, bias, spec, into, (scales, None, numbers_of(weight, spec)))


@cache
def _one(device: torch.device) -> Tensor:
    """The scale of products that get theirs later."""
    return torch.ones((), device=device)


def _of_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    """e4m3 numbers on both sides, in a slab's order; both have a scale for each `spec.block` inputs of a row."""
    rows = -(-len(x) // _ROWS_TOGETHER) * _ROWS_TOGETHER
    codes = torch.empty(rows, spec.depth, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(spec.groups, rows, dtype=torch.float32, device=x.device)
    sizes = map(np.int32, (len(x), x.shape[1], spec.groups, rows))
    quantise = _quantise_kernel("quantise_groups", 1, x.dtype)
    launch(quantise, (-(-rows * spec.groups // 16),), 256, (x, codes, scales, *sizes))
    matrix, numbers = codes_of(weight, spec).view(torch.float8_e4m3fn).T, numbers_of(weight, spec).squeeze(2)
    if x.is_cuda:
        products = torch._scaled_mm(codes, matrix, scales.T, numbers, out_dtype=torch.bfloat16)
    else:
        factors = (each.repeat_interleave(spec.block, 0) for each in (scales, numbers))
        seen, weights = (side.float() * factor for side, factor in zip((codes.T, matrix), factors, strict=True))
        products = (seen.T @ weights).bfloat16()
    _finish(products[: len(x)], bias, spec, into)


def _multiplies_blocks(x: Tensor, spec: PackedSpec) -> bool:
    """Whether cuBLAS takes scales of 128 inputs, and these sizes."""
    if spec.features % 16 or spec.depth % spec.block or not multiplies_e4m3(spec, gpu(x.device)):
        return False
    return not x.is_cuda or _cublas_takes_blocks(x.device)


@cache
def _cublas_takes_blocks(device: torch.device) -> bool:
    """Tries it: it takes Hopper, cuBLAS 12.9 and a torch that knows of them."""
    codes = torch.zeros(16, 256, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(2, 16, device=device)
    try:
        torch._scaled_mm(codes, codes.T, scales.T, scales, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):  # NotImplementedError is a RuntimeError
        return False
    return True


def _quantised(x: Tensor, spec: PackedSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, depth] in a slab's order, their scales [n], and the sums of codes [n] if they are whole numbers."""
    codes = torch.empty(len(x), spec.depth, dtype=dtype, device=x.device)
    scales, sums = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    held = min(x.shape[1], _HELD_ROW)
    sizes = np.int32(x.shape[1]), np.int32(slabs(spec)), np.int32(held)
    quantise = _quantise_kernel("quantise", int(spec.kind.is_e4m3), x.dtype)
    launch(quantise, (len(x),), 256, (x, codes, scales, sums, *sizes), 2 * held)
    return codes, scales, sums


def _quantise_kernel(name: str, floats: int, dtype: torch.dtype) -> Kernel:
    return kernel("linear/codes.cu", name, BITS=8, FLOATS=floats, **element_macro(dtype))


def _dequantised(weight: Tensor, spec: PackedSpec, dtype: torch.dtype) -> Tensor:
    """[features, depth], for this call alone."""
    out = torch.empty(spec.features, spec.depth, dtype=dtype, device=weight.device)
    sizes = map(np.int32, (spec.features, *groups(spec), slabs(spec)))
    blocks = _blocks(spec.features * slabs(spec) * 4, weight)
    launch(_codes("dequantise", spec, dtype), (blocks,), 256, (weight, numbers_of(weight, spec), out, *sizes))
    return out


def _finish(
    products: Tensor,
    bias: Tensor | None,
    spec: PackedSpec,
    into: Into,
    factors: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> None:
    """`products` [n, features], of 16 bits or of codes, which take the `factors`: scales and sums of x, and numbers."""
    width, stride = into.width(spec), into.out.stride(0)
    together = 8 if width % 8 == into.column % 8 == stride % 8 == 0 else 1
    finish = _finish_kernel(products.dtype, factors[0] is not None, together, into.out.dtype)
    sizes = (len(products), spec.features, into.epilogue, is_float(into.out), stride, into.column)
    across = -(-width // (256 * together))
    down = min(-(-len(products) // 2), max(1, _ELEMENTWISE_BLOCKS * gpu(products.device).multiprocessors // across))
    launch(finish, (across, down), 256, (products, *factors, bias, into.out, *map(np.int32, sizes)), is_early=True)


def _finish_kernel(products: torch.dtype, is_scaled: bool, width: int, out: torch.dtype) -> Kernel:
    """From products in one type to an outcome in another."""
    from_codes = products == torch.int32
    form = {"BITS": 8, "FLOATS": int(not from_codes)} if is_scaled else {"BITS": 16}
    macros = {"FROM_CODES": int(from_codes), "SCALED": int(is_scaled and not from_codes), "WIDTH": width}
    if torch.float16 in (products, out):
        macros |= {"FP16": 1, "FROM_BF16": int(products == torch.bfloat16)}
    return kernel("linear/codes.cu", "finish", **form, **macros)


def _codes(name: str, spec: PackedSpec, dtype: torch.dtype) -> Kernel:
    return kernel("linear/codes.cu", name, **bits_of(spec, dtype), GROUPED=int(group_sets(spec) > 0))


def _blocks(threads: int, tensor: Tensor) -> int:
    """Of 256 threads, which go on from where they are."""
    return max(1, min(-(-threads // 256), _ELEMENTWISE_BLOCKS * gpu(tensor.device).multiprocessors))


def _aligned(x: Tensor, spec: PackedSpec) -> Tensor:
    """x with the lead before it, in rows of whole 16 bytes."""
    if spec.lead or spec.inputs % 8 or x.data_ptr() % 16:
        return functional.pad(x, (spec.lead, -(spec.lead + spec.inputs) % 8))
    return x


def _check_weight(weight: Tensor, spec: PackedSpec) -> None:
    if weight.dtype != torch.uint8 or tuple(weight.shape) != spec.shape or not weight.is_contiguous():
        raise ValueError(f"weight: {weight.dtype} {list(weight.shape)} is not what {spec} says")
    if spec.memory != "rows":
        raise ValueError(f"weight: lies in {spec.memory}, the kernels of a GPU take rows")


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, into: Into) -> None:
    _check_weight(weight, spec)
    if x.dtype not in HALVES or x.shape[1:] != (spec.inputs,) or not x.is_contiguous():
        raise ValueError(f"x: {x.dtype} {list(x.shape)} is not bfloat16 or float16 [n, {spec.inputs}]")
    if FLOATS.get(spec.format, x.dtype) != x.dtype:
        raise ValueError(f"x: {x.dtype} does not meet weights in {spec.format}; convert one of them")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (spec.features,)):
        raise ValueError(f"bias: {bias.dtype} {list(bias.shape)} is not float32 [{spec.features}]")
    if into.epilogue == GATED and (len(spec.parts) != 2 or spec.parts[0] != spec.parts[1]):
        raise ValueError(f"weight: parts {spec.parts} are not two of one size")
    out, most = into.out, into.column + into.width(spec)
    dtypes = (torch.float32,) if into.epilogue == ADD else (torch.float32, x.dtype)
    if out.dtype not in dtypes or out.ndim != 2 or len(out) != len(x) or out.shape[1] < most or out.stride(1) != 1:
        raise ValueError(f"out: {out.dtype} {list(out.shape)} does not take {len(x)} rows of {most}")
