"""Products with weights in rows: random cases, and whether the ops of the CUDA kernels agree with float64 on them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import gpu
from allspan.kernels.cuda.linear import packed_linear as linear
from allspan.kernels.cuda.linear.gemm import skinny, skinny_shared, skinny_sm90
from allspan.kernels.ops import ACTIVATIONS
from allspan.kernels.packed_spec import ROW_FORMATS, PackedSpec
from allspan.kernels.reference.packed_linear import unpack
from support import kernel_oracle
from support.packed_cases import random_weight


def spec_of(name: str, group: int, parts: tuple[int, ...], inputs: int, k_offset: int = 0) -> PackedSpec:
    activation = {"bf16": "bf16", "f16": "f16", "fp8": "e4m3", "fp8_block": "e4m3", "mxfp4": "a8"}.get(name, "a16")
    return PackedSpec(name, activation, parts, inputs, k_offset, group, memory="rows")


@functools.lru_cache(maxsize=1)  # cases of a weight come one after the other
def weight_of(spec: PackedSpec, device: str) -> tuple[Tensor, Tensor]:
    """A random one, and float64 [features, inputs], what it holds; both are not to be written to."""
    weight = random_weight(spec).to(device)
    return weight, unpack(weight, spec, torch.float64)


class Case:
    """A random weight, x and bias, and what an op should write into columns `column` and on of 2 more than needed. x
    and what is not float32 of out are bfloat16, or float16 where the weights are or `is_half`."""

    def __init__(
        self,
        spec: PackedSpec,
        rows: int,
        device: str,
        has_bias: bool = True,
        column: int = 1,
        is_half: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(rows + spec.features)
        self.spec, self.column, self.slack = spec, column, 1.0
        self.dtype = torch.float16 if is_half or spec.format == "f16" else torch.bfloat16
        weight, values = weight_of(spec, device)
        x = torch.randn((rows, spec.inputs), generator=generator).to(self.dtype)
        bias = torch.randn(spec.features, generator=generator) if has_bias else None
        bias = None if bias is None else bias.to(device)
        self.arguments = (x.to(device), weight, bias, spec, column)
        self.device = device
        self.product = self.with_bias(x.double().to(device) @ values.T)

    def with_bias(self, product: Tensor) -> Tensor:
        bias = self.arguments[2]
        return product if bias is None else product + bias

    def out(self, dtype: torch.dtype, width: int, value: float = math.nan) -> Tensor:
        return torch.full((len(self.product), width + 2), value, dtype=dtype, device=self.device)

    def check(self, out: Tensor, expected: Tensor, slack: float = 1.0) -> None:
        """The columns beside are as they were. Many rows: weights, or what biases are added to, are of 16 bits."""
        end = self.column + expected.shape[1]
        inside = out[:, self.column : end].double()
        device = gpu(torch.device(self.device))
        rows, spec = len(out), self.spec
        is_few = rows <= skinny.MOST_ROWS or skinny_shared.takes(rows, spec, device)
        is_few = is_few and not skinny_sm90.takes(rows, spec, device)
        rounded = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}[out.dtype]
        many = 4e-3 if self.dtype is torch.float16 and not self.spec.kind.is_e4m3 else 2e-2
        tolerance = rounded if is_few else many
        torch.testing.assert_close(inside, expected, rtol=tolerance, atol=self.slack * slack * tolerance)
        beside = torch.cat((out[:, : self.column], out[:, end:]), 1)
        assert (beside.isnan() | (beside == 0.5)).all()


def check_store(case: Case) -> None:
    for dtype in (case.dtype, torch.float32):
        out = case.out(dtype, case.spec.features)
        linear.packed_linear(*case.arguments, out)
        case.check(out, case.product)


def check_add(case: Case) -> None:
    out = case.out(torch.float32, case.spec.features, 0.5)
    linear.packed_linear_add(*case.arguments, out)
    case.check(out, case.product + 0.5)


def check_gated(case: Case) -> None:
    width = case.product.shape[1] // 2
    out = case.out(case.dtype, width)
    for activation in ACTIVATIONS:
        linear.packed_gated_linear(*case.arguments, activation, out)
        right = case.product.new_empty(len(case.product), width, dtype=torch.float64)
        kernel_oracle.gated_mul(case.product.double(), activation, right)
        case.check(out, right, slack=4.0)  # the error of each, times the other


def check_odd_sizes(name: str, group: int, device: str, rows: int = 3, is_half: bool = False) -> None:
    """A rank's inputs may begin within a group."""
    k_offset = 24 + 5 if ROW_FORMATS[name].scale_bytes else 0
    case = Case(spec_of(name, group, (21, 18), 301 if group != 512 else 700, k_offset), rows, device, is_half=is_half)
    out = case.out(torch.float32, 39)
    linear.packed_linear(*case.arguments, out)
    case.check(out, case.product)
