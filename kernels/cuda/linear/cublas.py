"""Matrix products of many rows by cuBLAS, through torch: in 16 bits, int8 and e4m3."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Gpu, gpu
from allspan.kernels.cuda.linear.call import ADD, LinearCall, is_float
from allspan.kernels.cuda.linear.dequantise import matrix_of
from allspan.kernels.cuda.linear.derived import derived
from allspan.kernels.cuda.linear.epilogue import finish
from allspan.kernels.cuda.linear.quantise_input import quantise_blocks, quantise_rows
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import codes_of, qparams_of


def multiplies_e4m3(spec: PackedSpec, device: Gpu) -> bool:
    """Whether cuBLAS multiplies weights of this format as they are; for fp8_block its version decides, too."""
    since = {"fp8": device.capability >= (8, 9), "fp8_block": device.capability == (9, 0)}
    return since.get(spec.format, False)


def takes_int8(spec: PackedSpec) -> bool:
    """Whether x is to be quantised to int8, and cuBLAS takes these sizes."""
    return spec.activation == "a8" and spec.format == "channel8" and spec.features % 8 == 0


def takes_e4m3(spec: PackedSpec, device: Gpu) -> bool:
    """Whether cuBLAS takes e4m3 weights with scales a channel, and these sizes."""
    return spec.format == "fp8" and spec.features % 16 == 0 and multiplies_e4m3(spec, device)


def takes_e4m3_blocks(spec: PackedSpec, x: Tensor) -> bool:
    """Whether cuBLAS takes e4m3 weights with scales of 128 inputs, and these sizes."""
    if spec.format != "fp8_block" or spec.features % 16 or spec.depth % spec.block:
        return False
    return multiplies_e4m3(spec, gpu(x.device)) and (not x.is_cuda or _has_block_scales(x.device))


def halves(call: LinearCall) -> None:
    """Multiplies in x's type; the weight is dequantised before."""
    x, bias, output = call.x, call.bias, call.output
    matrix, view = matrix_of(call), output.view(call.spec)
    if output.is_gated or (bias is not None and is_float(output.out)):
        finish(torch.mm(x, matrix.T), call)
    elif bias is not None:
        torch.addmm(_rounded(bias, x.dtype), x, matrix.T, out=view)
    elif not is_float(output.out):
        torch.mm(x, matrix.T, out=view)
    elif x.is_cuda:
        if output.epilogue == ADD:
            torch.addmm(view, x, matrix.T, out_dtype=torch.float32, out=view)
        else:
            torch.mm(x, matrix.T, out_dtype=torch.float32, out=view)
    else:
        product = x.float() @ matrix.float().T
        view.copy_(product + view if output.epilogue == ADD else product)


def int8(call: LinearCall) -> None:
    """Multiplies int8 by int8, both in the order of a k tile; scales and offsets come after."""
    codes, scales, sums = quantise_rows(call.padded_x(), call.spec, torch.int8)
    products = torch._int_mm(codes, codes_of(call.weight, call.spec).view(torch.int8).T)
    finish(products, call, (scales, sums, qparams_of(call.weight, call.spec)))


def e4m3(call: LinearCall) -> None:
    """Multiplies e4m3 by e4m3, both in the order of a k tile; the scales of rows and features come after."""
    codes, scales, _ = quantise_rows(call.padded_x(), call.spec, torch.float8_e4m3fn)
    matrix = codes_of(call.weight, call.spec).view(torch.float8_e4m3fn)
    if codes.is_cuda:
        one = _one(codes.device)
        products = torch._scaled_mm(codes, matrix.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        products = (codes.float() @ matrix.T.float()).bfloat16()
    finish(products, call, (scales, None, qparams_of(call.weight, call.spec)))


def e4m3_blocks(call: LinearCall) -> None:
    """Multiplies e4m3 by e4m3, both in the order of a k tile and with a scale for each `spec.block` inputs of a row."""
    spec = call.spec
    codes, scales = quantise_blocks(call.padded_x(), spec)
    matrix = codes_of(call.weight, spec).view(torch.float8_e4m3fn).T
    qparams = qparams_of(call.weight, spec).squeeze(2)
    if codes.is_cuda:
        products = torch._scaled_mm(codes, matrix, scales.T, qparams, out_dtype=torch.bfloat16)
    else:
        factors = (each.repeat_interleave(spec.block, 0) for each in (scales, qparams))
        seen, weights = (side.float() * factor for side, factor in zip((codes.T, matrix), factors, strict=True))
        products = (seen.T @ weights).bfloat16()
    finish(products[: call.rows], call)


def _rounded(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bias in `dtype`, as cuBLAS adds it."""
    return derived(bias, dtype, lambda: bias.to(dtype))


@cache
def _one(device: torch.device) -> Tensor:
    """Returns the scale of products that are scaled later."""
    return torch.ones((), device=device)


@cache
def _has_block_scales(device: torch.device) -> bool:
    """Whether a product with scales of 128 inputs runs: it needs Hopper, cuBLAS 12.9 and a torch that offers them."""
    codes = torch.zeros(16, 256, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(2, 16, device=device)
    try:
        torch._scaled_mm(codes, codes.T, scales.T, scales, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):  # NotImplementedError is a RuntimeError
        return False
    return True
