"""Linear layers with packed weights in rows (`allspan.kernels.row_layout`), for models of 16 bits: see
`allspan.kernels.ops.OpSet`.

x is bfloat16 or float16 [n, K]; out is of its type, or float32 (logits, and what `packed_linear_add` adds to), and so
are weights of 16 bits and dequantised ones. Sums are float32. `dispatch.py` chooses the kernel:

- Few rows (`gemm/gemv.py`, `gemm/skinny*.py`) read the weight once, at the speed of memory; quantised weights meet x as
  it is, whatever the spec's activation: at these sizes rounding x would save nothing.
- Many rows go to cuBLAS, through torch, or on Hopper to `gemm/gemm_sm90.py`, where that is faster. Weights are
  dequantised to x's type first; but with scales a channel and activation a8 or e4m3, x becomes int8 or e4m3 (sm_89 and
  later), with a scale a row, and quantised values are multiplied as they are. So are those of fp8_block on Hopper (with
  cuBLAS 12.9 or later), and x has a scale for each 128 inputs. Products of e4m3 come in bfloat16, which has the range
  that they need before they meet scales.

So a row's bits depend on how many come with it, unlike on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES
from allspan.kernels.cuda.linear.call import ADD, GATED, STORE, LinearCall, Output, check_weight
from allspan.kernels.cuda.linear.dispatch import choose
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.row_layout import FLOATS

_EPILOGUES = {"packed_linear": STORE, "packed_linear_add": ADD}


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor) -> None:
    """See `OpSet.packed_linear`. Raises ValueError for what the kernels would read or write past."""
    run(LinearCall(x, weight, bias, spec, Output(out, column, STORE)))


def packed_linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor
) -> None:
    """See `OpSet.packed_linear_add`; out is float32."""
    run(LinearCall(x, weight, bias, spec, Output(out, column, ADD)))


def packed_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, activation: str, out: Tensor
) -> None:
    """See `OpSet.packed_gated_linear`."""
    run(LinearCall(x, weight, bias, spec, Output(out, column, GATED[activation])))


def kernel_name(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, *rest: Any
) -> str:
    """Returns the name of the kernel that runs one of these ops with these arguments."""
    *activation, out = rest
    epilogue = GATED[activation[0]] if activation else _EPILOGUES[op]
    return choose(LinearCall(x, weight, bias, spec, Output(out, column, epilogue))).name


def run(call: LinearCall) -> None:
    """Runs what the ops above are. Raises ValueError for what the kernels would read or write past."""
    _check(call)
    if call.rows and call.spec.features:
        choose(call).run(call)


def _check(call: LinearCall) -> None:
    x, bias, spec, output = call.x, call.bias, call.spec, call.output
    check_weight(call.weight, spec)
    if x.dtype not in HALVES or x.shape[1:] != (spec.inputs,) or not x.is_contiguous():
        raise ValueError(f"x: {x.dtype} {list(x.shape)} is not bfloat16 or float16 [n, {spec.inputs}]")
    if FLOATS.get(spec.format, x.dtype) != x.dtype:
        raise ValueError(f"x: {x.dtype} does not meet weights in {spec.format}; convert one of them")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (spec.features,)):
        raise ValueError(f"bias: {bias.dtype} {list(bias.shape)} is not float32 [{spec.features}]")
    if output.is_gated and (len(spec.parts) != 2 or spec.parts[0] != spec.parts[1]):
        raise ValueError(f"weight: parts {spec.parts} are not two of one size")
    out, most = output.out, output.column + output.width(spec)
    dtypes = (torch.float32,) if output.epilogue == ADD else (torch.float32, x.dtype)
    if out.dtype not in dtypes or out.ndim != 2 or len(out) != len(x) or out.shape[1] < most or out.stride(1) != 1:
        raise ValueError(f"out: {out.dtype} {list(out.shape)} does not take {len(x)} rows of {most}")
