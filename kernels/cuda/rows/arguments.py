"""What the launchers of this folder share: types of elements as the kernels number them, and checks of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""float16 and bfloat16 do not come together."""
QUANTISED = (torch.int8, torch.float8_e4m3fn)
"""Types of quantised activations."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3, torch.float16: 1}
NOTHING = 4
"""The types' numbers in elements.cuh."""
EARLY = True
"""Blocks begin while the kernel ahead ends: these kernels wait for it themselves."""
GROUP = 128
"""Elements that share a scale, where a row has several."""

Types = tuple[torch.dtype | None, ...]


def check(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]) -> None:
    """Raises ValueError unless it is contiguous, of one of these dtypes and of this shape."""
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not contiguous {kinds} {shape}")


def is_whole(width: int, *tensors: Tensor | None) -> int:
    """1 where rows of so many elements can be had in accesses of 16 bytes, else 0: macro WHOLE."""
    return int(width % 8 == 0 and all(t is None or t.data_ptr() % 16 == 0 for t in tensors))


def type_number(dtype: torch.dtype | None) -> int:
    """The macro of a tensor's type; None: the tensor is not there."""
    return NOTHING if dtype is None else TYPES[dtype]


def unit_of(*tensors: Tensor | None) -> int:
    """Elements in 16 bytes of the widest type."""
    return 4 if any(tensor is not None and tensor.dtype is torch.float32 for tensor in tensors) else 8


def strides_of(scales: Tensor | None) -> tuple[np.int64, np.int64]:
    if scales is None:
        return np.int64(0), np.int64(0)
    return np.int64(scales.stride(0)), np.int64(scales.stride(1) if scales.ndim == 2 else 0)
