"""HeldTensor: shape and dtype of a tensor before there is memory for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from allspan.worker.process.release_memory import anonymous

_ALIGNMENT = 128
"""Bytes: of a pair of cache lines, which the processor fetches together."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor that a rank keeps in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def host_zeros(declared: Mapping[str, HeldTensor]) -> dict[str, Tensor]:
    """Returns zeros for tensors, by name, in one stretch of host memory, which has large pages where the system has
    some: see `anonymous`."""
    sizes = [-(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT for tensor in declared.values()]
    parts = torch.split(anonymous(sum(sizes)), sizes)
    return {
        name: part[: tensor.num_bytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), part in zip(declared.items(), parts, strict=True)
    }
