"""A kernel backend from outside: one op of its own, and the reference for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

calls: list[int] = []


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    calls.append(len(x))
    out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)
