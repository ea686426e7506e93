"""Random rows for the CUDA kernels, and buffers that show what was written past."""

from __future__ import annotations

import math

import torch
from torch import Tensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def rows(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu", seed: int = 0) -> Tensor:
    """Normally distributed."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def poisoned(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    """Nobody has written it: NaN, or 85 where there is no NaN. One row more lies behind it: see `is_kept`."""
    past = (shape[0] + 1, *shape[1:])
    if dtype is torch.float8_e4m3fn:
        return torch.full(past, 0x7F, dtype=torch.uint8, device=device).view(dtype)[:-1]
    return torch.full(past, math.nan if dtype.is_floating_point else 85, dtype=dtype, device=device)[:-1]


def is_kept(out: Tensor) -> bool:
    """Whether the row behind a poisoned buffer is as it was."""
    width = out[:1].numel() if len(out) else out.stride(0)
    behind = torch.as_strided(out, (width,), (1,), len(out) * out.stride(0)).float()
    return bool((behind.isnan() | (behind == 85)).all())
