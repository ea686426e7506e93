"""Matrices as quantised checkpoints hold them: codes, which are integers or e4m3 ones, and scales.

A weight is (code - zero) · scale, of the group that its input belongs to. `QuantisedMatrix.kind` says in a word how one
is stored, for `allspan.worker.quant.stored`.
"""

from __future__ import annotations

import dataclasses
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

IRREGULAR = "irregular"


@dataclass(frozen=True, slots=True)
class QuantisedMatrix(ABC):
    name: str
    """ "fp8", "int4" or "int8"; "a8w8": int8, and inputs are to have 8 bits, too."""
    shape: tuple[int, int]
    """[out, in]."""
    group: int
    """Inputs that share a scale; -1: all."""
    group_of: Tensor | None
    """int64 [in]: the group of each input; None: they come group by group."""

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
        """NAME/GROUP; where inputs do not come group by group NAME/GROUP/ORDER: a hash of their order, or IRREGULAR, if
        groups are not of one size."""
        kind = f"{self.name}/{self.group}"
        if self.group_of is None:
            return kind
        if not torch.equal(self.group_of.sort()[0], in_groups(self.shape[1], self.group)):
            return f"{kind}/{IRREGULAR}"
        return f"{kind}/{zlib.crc32(self.order().numpy().tobytes()):08x}"

    @property
    def dimensions(self) -> tuple[int, ...]:
        """`shape`, or [experts, out, in] of matrices that are one tensor."""
        return self.shape

    def order(self, expert: int = 0) -> Tensor:
        """int32 [in]: the inputs, group by group; of this expert's matrix, where those of all are one tensor."""
        order = torch.arange(self.shape[1]) if self.group_of is None else self.group_of.argsort(stable=True)
        return order.int()

    def to(self, device: torch.device) -> Self:
        """With its tensors there."""
        held = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: part.to(device) for name, part in held.items() if isinstance(part, Tensor)}
        return dataclasses.replace(self, **moved)

    def floats(self, rows: range, inputs: range) -> Tensor:
        """float32 [rows, inputs]."""
        groups = in_groups(self.shape[1], self.group) if self.group_of is None else self.group_of
        groups = groups[inputs.start : inputs.stop]
        codes, zeros = self.codes(rows, inputs), self.zeros(rows)
        values = codes.view(torch.float8_e4m3fn).float() if zeros is None else codes.float() - zeros[:, groups]
        return values * self.scales(rows)[:, groups]

    def fields(self, rows: range, inputs: range) -> dict[str, Tensor]:
        """Codes, scales and offsets as `allspan.kernels.reference.packed_linear` has them: of `inputs`, which begin
        with a group; all of them in `order`, where that is another."""
        codes = self.codes(rows, inputs)
        if self.group_of is not None:
            codes = codes[:, self.order()]
        size = self.group if self.group != -1 else max(1, self.shape[1])
        groups = slice(inputs.start // size, -(-inputs.stop // size))
        scales, zeros = self.scales(rows)[:, groups], self.zeros(rows)
        made = {"codes": codes, "scales": scales}
        return made if zeros is None else made | {"offsets": zeros[:, groups] * scales}


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
        return numbers[torch.arange(rows.start, rows.stop, device=numbers.device) // self.tall]


@dataclass(frozen=True, slots=True)
class WordMatrix(QuantisedMatrix):
    """Codes of compressed-tensors, `bits` each: the inputs of an output side by side in words of 32 bits, the first in
    the lowest."""

    bits: int
    words: Tensor
    """int32 [out, words of inputs]."""
    scale: Tensor
    """[out, groups]."""
    zero: Tensor | None
    """int32 [words of outputs, groups]; None: 0 is half of all codes."""

    def codes(self, rows: range, inputs: range) -> Tensor:
        each = 32 // self.bits
        words, first = _words(inputs, each)
        codes = unpacked(self.words[rows.start : rows.stop, words], self.bits).flatten(1)
        return codes[:, first : first + len(inputs)]

    def scales(self, rows: range) -> Tensor:
        return self.scale[rows.start : rows.stop].float()

    def zeros(self, rows: range) -> Tensor:
        if self.zero is None:
            return torch.full_like(self.scales(rows), 2.0 ** (self.bits - 1))
        words, first = _words(rows, 32 // self.bits)
        zeros = unpacked(self.zero[words], self.bits).transpose(1, 2).flatten(0, 1)
        return zeros[first : first + len(rows)].float()


@dataclass(frozen=True, slots=True)
class GptqMatrix(QuantisedMatrix):
    """Codes of GPTQ: words of the inputs of an output, words lying output by output; zeros in words of outputs."""

    bits: int
    words: Tensor
    """int32 [words of inputs, out]."""
    zero: Tensor
    """int32 [groups, words of outputs]."""
    scale: Tensor
    """[groups, out]."""
    lack: int
    """The number by which zeros are stored too low."""

    def codes(self, rows: range, inputs: range) -> Tensor:
        words, first = _words(inputs, 32 // self.bits)
        codes = unpacked(self.words[words, rows.start : rows.stop].T, self.bits).flatten(1)
        return codes[:, first : first + len(inputs)]

    def scales(self, rows: range) -> Tensor:
        return self.scale[:, rows.start : rows.stop].T.float()

    def zeros(self, rows: range) -> Tensor:
        words, first = _words(rows, 32 // self.bits)
        zeros = unpacked(self.zero[:, words], self.bits).flatten(1)[:, first : first + len(rows)]
        return (zeros + self.lack & (1 << self.bits) - 1).T.float()


@dataclass(frozen=True, slots=True)
class AwqMatrix(QuantisedMatrix):
    """4-bit codes of AWQ's "gemm": words of outputs, in which outputs 0 to 7 are codes 0, 4, 1, 5, 2, 6, 3 and 7."""

    words: Tensor
    """int32 [in, words of outputs]."""
    zero: Tensor
    """int32 [groups, words of outputs]."""
    scale: Tensor
    """[groups, out]."""

    def codes(self, rows: range, inputs: range) -> Tensor:
        return self._outputs(self.words[inputs.start : inputs.stop], rows).T

    def scales(self, rows: range) -> Tensor:
        return self.scale[:, rows.start : rows.stop].T.float()

    def zeros(self, rows: range) -> Tensor:
        return self._outputs(self.zero, rows).T.float()

    def _outputs(self, packed: Tensor, rows: range) -> Tensor:
        words, first = _words(rows, 8)
        codes = unpacked(packed[:, words], 4)[:, :, [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)
        return codes[:, first : first + len(rows)]


@dataclass(frozen=True, slots=True)
class StackedMatrix(QuantisedMatrix):
    """The matrices of all experts, of one shape each, which lie below each other. Rows are counted through all of them,
    and those asked for are one expert's."""

    matrices: tuple[QuantisedMatrix, ...]

    @classmethod
    def of(cls, matrices: Sequence[QuantisedMatrix]) -> StackedMatrix:
        first = matrices[0]
        outputs, inputs = first.shape
        return cls(first.name, (len(matrices) * outputs, inputs), first.group, None, tuple(matrices))

    @property
    def kind(self) -> str:
        return joint_kind([each.kind for each in self.matrices])

    @property
    def dimensions(self) -> tuple[int, ...]:
        return len(self.matrices), *self.matrices[0].shape

    def order(self, expert: int = 0) -> Tensor:
        return self.matrices[expert].order()

    def to(self, device: torch.device) -> Self:
        return dataclasses.replace(self, matrices=tuple(each.to(device) for each in self.matrices))

    def codes(self, rows: range, inputs: range) -> Tensor:
        matrix, own = self._of(rows)
        return matrix.codes(own, inputs)

    def scales(self, rows: range) -> Tensor:
        matrix, own = self._of(rows)
        return matrix.scales(own)

    def zeros(self, rows: range) -> Tensor | None:
        matrix, own = self._of(rows)
        return matrix.zeros(own)

    def floats(self, rows: range, inputs: range) -> Tensor:
        matrix, own = self._of(rows)
        return matrix.floats(own, inputs)

    def fields(self, rows: range, inputs: range) -> dict[str, Tensor]:
        matrix, own = self._of(rows)
        return matrix.fields(own, inputs)

    def _of(self, rows: range) -> tuple[QuantisedMatrix, range]:
        """The matrix that has these rows, and their numbers in it."""
        each = self.matrices[0].shape[0]
        expert = min(rows.start // each, len(self.matrices) - 1)
        return self.matrices[expert], range(rows.start - expert * each, rows.stop - expert * each)


def joint_kind(kinds: Sequence[str]) -> str:
    """The kind of experts' matrices, which are held alike: theirs, or one that no method holds as it is, where there
    are several. Every expert has an order of its own: the hash is of all, so that gate and up with equal ones agree
    expert by expert."""
    plain = sorted({without_order(kind) for kind in kinds})
    if len(plain) > 1:
        return " and ".join(kind or "another" for kind in plain)
    orders = [kind[len(plain[0]) + 1 :] for kind in kinds]
    if not any(orders):
        return plain[0]
    order = IRREGULAR if IRREGULAR in orders else f"{zlib.crc32(' '.join(orders).encode()):08x}"
    return f"{plain[0]}/{order}"


def without_order(kind: str) -> str:
    """A kind but for the order of inputs."""
    return kind if kind.count("/") < 2 or " " in kind else kind.rpartition("/")[0]


def in_groups(inputs: int, group: int) -> Tensor:
    """int64 [inputs]: the group of each, where they come group by group."""
    return torch.arange(inputs) // (group if group != -1 else max(1, inputs))


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 […] → uint8 […, 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8)


def _words(codes: range, each: int) -> tuple[slice, int]:
    """The words that hold these codes, and which of theirs is the first."""
    return slice(codes.start // each, -(-codes.stop // each)), codes.start % each
