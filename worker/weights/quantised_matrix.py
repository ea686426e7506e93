"""Matrices as quantised checkpoints hold them: codes, which are whole numbers or e4m3 ones, and scales.

A weight is (code - zero) · scale, of the group that its input belongs to. `QuantisedMatrix.kind` says in a word how one
is stored, for `allspan.worker.quant.stored`.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantisedMatrix(ABC):
    name: str
    """"fp8", "int4" or "int8"; "a8w8": int8, and inputs are to have 8 bits, too."""
    shape: tuple[int, int]
    """[out, in]."""
    group: int
    """Inputs that share a scale; -1: all."""
    order: Tensor | None
    """int32 [in]: the inputs, those of a group next to each other; None: they are as they come."""

    @abstractmethod
    def codes(self, rows: range, inputs: range) -> Tensor:
        """uint8 [rows, inputs]; of fp8 the bits of e4m3 numbers."""

    @abstractmethod
    def scales(self, rows: range) -> Tensor:
        """float32 [rows, groups]."""

    def zeros(self, rows: range) -> Tensor | None:
        """float32 [rows, groups]: the code that means 0; None: codes are e4m3."""
        return None

    @property
    def kind(self) -> str:
        """NAME/GROUP; of a matrix whose inputs are not in the order of their groups NAME/GROUP/ORDER, a hash of it."""
        kind = f"{self.name}/{self.group}"
        return kind if self.order is None else f"{kind}/{zlib.crc32(self.order.numpy().tobytes()):08x}"

    def floats(self, rows: range, inputs: range) -> Tensor:
        """float32 [rows, inputs]."""
        groups = self._groups()[inputs.start : inputs.stop]
        codes, zeros = self.codes(rows, inputs), self.zeros(rows)
        values = codes.view(torch.float8_e4m3fn).float() if zeros is None else codes.float() - zeros[:, groups]
        return values * self.scales(rows)[:, groups]

    def fields(self, rows: range, inputs: range) -> dict[str, Tensor]:
        """Codes, scales and offsets as `allspan.kernels.reference.packed` has them: of `inputs`, which begin with a
        group, in the order of groups."""
        if self.order is None:
            codes = self.codes(rows, inputs)
        else:
            codes = self.codes(rows, range(self.shape[1]))[:, self.order[inputs.start : inputs.stop].long()]
        size = self.group if self.group != -1 else max(1, self.shape[1])
        groups = slice(inputs.start // size, -(-inputs.stop // size))
        scales, zeros = self.scales(rows)[:, groups], self.zeros(rows)
        fields = {"codes": codes, "scales": scales}
        return fields if zeros is None else fields | {"offsets": zeros[:, groups] * scales}

    def _groups(self) -> Tensor:
        """int64 [in]: the group of each."""
        groups = torch.arange(self.shape[1]) // (self.group if self.group != -1 else max(1, self.shape[1]))
        return groups if self.order is None else torch.empty_like(groups).scatter_(0, self.order.long(), groups)


@dataclass(frozen=True, slots=True)
class ScaledMatrix(QuantisedMatrix):
    """Numbers of 8 bits, one by one, with a scale for all, for each output, or for each of some `tall` outputs and
    `group` inputs."""

    weight: Tensor
    """float8_e4m3fn or int8 [out, in]."""
    scale: Tensor
    """[groups of outputs, groups of inputs]."""
    tall: int
    zero: Tensor | None
    """int8, like `scale`; None: 0."""

    def codes(self, rows: range, inputs: range) -> Tensor:
        codes = self.weight.view(torch.uint8)[rows.start : rows.stop, inputs.start : inputs.stop]
        return codes if self.weight.dtype == torch.float8_e4m3fn else codes ^ 128

    def scales(self, rows: range) -> Tensor:
        return self._of(self.scale, rows).float()

    def zeros(self, rows: range) -> Tensor | None:
        if self.weight.dtype == torch.float8_e4m3fn:
            return None
        return torch.full_like(self.scales(rows), 128) if self.zero is None else self._of(self.zero, rows).float() + 128

    def _of(self, numbers: Tensor, rows: range) -> Tensor:
        return numbers[torch.arange(rows.start, rows.stop) // self.tall]
