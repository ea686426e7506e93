"""Products of many rows in bfloat16 with float32 weights, by cuBLAS on tensor cores: a router's.

A weight is the sum of three numbers of 8 bits each, as bfloat16 has, to a relative 2^-24. What each of them makes with
a row is exact before it is summed up in float32: the product is as near as one in float32, which has no tensor cores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.cuda.linear.derived import derived

_PARTS = 3


def takes(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Whether `linear` is for these tensors."""
    return x.dtype == torch.bfloat16 and weight.dtype == out.dtype == torch.float32 and x.shape[1] > 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out float32 [n, N] = x bfloat16 [n, K] · weight float32 [N, K]ᵀ + bias float32 [N]."""
    matrix = derived(weight, "parts", lambda: _parts(weight))
    products = torch.mm(x, matrix.T, out_dtype=torch.float32) if x.is_cuda else x.float() @ matrix.float().T
    torch.sum(products.view(len(x), _PARTS, len(weight)), 1, out=out)
    if bias is not None:
        out += bias


def _parts(weight: Tensor) -> Tensor:
    """Returns [parts · N, K] in bfloat16: the smallest first, what is left of a number when the others are taken."""
    found, rest = [], weight
    for _ in range(_PARTS):
        found.append(rest.bfloat16())
        rest = rest - found[-1].float()
    return torch.cat(found[::-1])
