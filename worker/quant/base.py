"""LinearMethod: how the weight of a linear layer is held and applied. The model never knows which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from allspan.worker.models.program import ProgramBuilder, Slot


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What this rank holds of a linear layer whose weight is several checkpoint tensors, one below the other."""

    part_rows: tuple[int, ...]
    """Output features of each part."""
    in_features: int
    has_bias: bool

    @property
    def out_features(self) -> int:
        return sum(self.part_rows)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor that a method keeps in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class PartReader(Protocol):
    def __call__(self, part: int, suffix: str, out: Tensor) -> None:
        """Reads this rank's slice of the part's tensor ("weight" [rows, in_features] or "bias" [rows]) into `out`."""


class LinearMethod(Protocol):
    """A row of `allspan.worker.quant.table.METHODS`."""

    def tensors(self, shape: LinearShape) -> dict[str, HeldTensor]:
        """What the layer holds, by suffix."""

    def load(self, shape: LinearShape, read: PartReader, held: Mapping[str, Tensor]) -> None:
        """Fills the tensors that `tensors` declared."""

    def emit(self, program: ProgramBuilder, weights: Mapping[str, Slot], x: Slot, out: Slot) -> None:
        """Appends the ops of out = x · weightᵀ (+ bias)."""
