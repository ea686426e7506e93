"""The kernel of a packed linear product is the first row of `KERNELS` whose predicate holds.

A row says which calls a kernel takes and which measurement put it there; `choose` returns it. Times are µs
inside CUDA graphs on one H200, of the shapes of Qwen2.5-7B; docs/kernel-figures.md has all cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from allspan.kernels.cuda.linear import cublas
from allspan.kernels.cuda.linear.call import LinearCall
from allspan.kernels.cuda.linear.gemm import gemm_sm90, gemv, skinny, skinny_shared, skinny_sm90


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """A row of the table: a kernel, the calls that it takes, and why it goes before the rows below it."""

    name: str
    takes: Callable[[LinearCall], bool]
    reason: str
    run: Callable[[LinearCall], None]


KERNELS = (
    LinearKernel(
        "gemv",
        lambda call: call.rows == 1 and gemv.takes(call.spec, call.output, call.gpu),
        "one row and quantised weights of up to 256 MB: 4.7 µs for o in uint4, where cuBLAS takes 11.3 in bfloat16; "
        "larger weights are read a few percent faster by skinny",
        gemv.run,
    ),
    LinearKernel(
        "skinny",
        lambda call: call.rows <= skinny.MOST_ROWS or call.spec.inputs == 0,
        "up to 8 rows are bound by reading the weight once: 21.4 µs for 4 rows of gate+up in uint4, 62.8 in bfloat16, "
        "where cuBLAS takes 66.8",
        skinny.run,
    ),
    LinearKernel(
        "skinny_sm90",
        lambda call: skinny_sm90.takes(call.rows, call.spec, call.gpu),
        "33 to 64 rows of 4-bit weights on sm_90: warpgroups are faster than skinny_shared there, and slower with "
        "fewer rows or 8 bits",
        skinny_sm90.run,
    ),
    LinearKernel(
        "skinny_shared",
        lambda call: skinny_shared.takes(call.rows, call.spec, call.gpu),
        "9 to 64 rows of quantised weights (16 where cuBLAS multiplies e4m3, half as many before sm_80): 33.6 µs "
        "for 16 rows of gate+up in uint4, where cuBLAS takes 68.2 in bfloat16",
        skinny_shared.run,
    ),
    LinearKernel(
        "cublas_int8",
        lambda call: cublas.takes_int8(call.spec),
        "many rows of int8 weights with scales a channel and activation a8: x is quantised, cuBLAS multiplies int8",
        cublas.int8,
    ),
    LinearKernel(
        "gemm_sm90_e4m3",
        lambda call: cublas.takes_e4m3(call.spec, call.gpu) and gemm_sm90.pays_e4m3(call),
        "256 rows or more of fp8 weights on sm_90: the epilogue within the product saves a pass that takes longer than "
        "the idle part of the last wave",
        gemm_sm90.run_e4m3,
    ),
    LinearKernel(
        "cublas_e4m3",
        lambda call: cublas.takes_e4m3(call.spec, call.gpu),
        "many rows of fp8 weights with scales a channel on sm_89 and later: cuBLAS multiplies e4m3, scales come after",
        cublas.e4m3,
    ),
    LinearKernel(
        "cublas_e4m3_blocks",
        lambda call: cublas.takes_e4m3_blocks(call.spec, call.x),
        "many rows of fp8 weights with scales of 128 inputs on sm_90: cuBLAS 12.9 applies both sides' scales",
        cublas.e4m3_blocks,
    ),
    LinearKernel(
        "gemm_sm90",
        gemm_sm90.pays_halves,
        "256 rows or more of a gated product on sm_90: SwiGLU within the product saves a pass; without one "
        "cuBLAS is as fast",
        gemm_sm90.run_halves,
    ),
    LinearKernel(
        "cublas",
        lambda call: True,
        "many rows in 16 bits: cuBLAS; quantised weights are dequantised first",
        cublas.halves,
    ),
)


def choose(call: LinearCall) -> LinearKernel:
    """Returns the row that runs this call."""
    return next(kernel for kernel in KERNELS if kernel.takes(call))
