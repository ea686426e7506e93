"""PieceSource: this rank's rows of a checkpoint's tensors, wherever and in whatever order they lie there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from allspan.protos.api.errors import InternalError
from allspan.worker.models.pieces import Axis, Linear, Table, Vector
from allspan.worker.models.shard import Shard
from allspan.worker.weights.checkpoint import BlockCheckpoint, Checkpoint, QuantisedCheckpoint
from allspan.worker.weights.weight_map import WeightMap

_LEAST_NORM = 1e-12
"""What shorter rows are divided by, as torch has it."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows to read of a checkpoint's tensor, perhaps every second one, and which of those are wanted, in order (None:
    all, as they come)."""

    read: range
    order: Tensor | None = None


def _foreign_rows(wanted: range, axis: Axis, rotary_dim: int, first: int, start: int = 0) -> _Rows:
    """Where these rows (of the whole weight, each unit's pairs half a rotary dimension apart) lie in a tensor that has
    pairs side by side and whose first row of the weight is `first`. `start`: elements of a unit before its pairs."""
    if not rotary_dim or not wanted:
        return _Rows(range(first + wanted.start, first + wanted.stop))
    unit, half = axis.unit, rotary_dim // 2
    row = torch.arange(wanted.start, wanted.stop)
    element = row % unit - start
    turned = torch.where(element < half, 2 * element, 2 * (element - half) + 1)
    is_turned = (element >= 0) & (element < rotary_dim)
    there = row + torch.where(is_turned, turned - element, 0)
    begin, stop = int(there.min()), int(there.max()) + 1
    return _Rows(range(first + begin, first + stop), there - begin)


@dataclass(frozen=True, slots=True)
class PieceSource:
    """See `allspan.worker.quant.base.Source`."""

    shard: Shard
    weights: WeightMap
    checkpoint: Checkpoint
    piece: Linear | Table
    expert: int = 0
    """The number in the whole model of the expert whose piece is read, where every expert has one."""

    def bias(self, part: int, out: Tensor) -> None:
        axis = self.piece.parts[part].rows
        name, rows = self._find(part, range(len(self.shard.part(axis))), "bias")
        self._read(name, [rows.read], rows.order, out)

    def floats(self, part: int, rows: range, inputs: range, out: Tensor) -> None:
        name, found = self._find(part, rows)
        if isinstance(self.piece, Linear) and self.piece.has_unit_rows:
            values = torch.empty(out.shape)
            self._read(name, [found.read, range(self.piece.inputs.size)], found.order, values)
            out.copy_(torch.nn.functional.normalize(values, dim=1, eps=_LEAST_NORM))
            return
        if self.weights.is_transposed(f"{self.piece.parts[part].name}.weight", self.checkpoint.naming):
            columns = torch.empty((len(inputs), len(found.read)), dtype=out.dtype)
            self._read(name, [inputs, found.read], None, columns)
            out.copy_(columns.T if found.order is None else columns.T[found.order])
            return
        self._read(name, [found.read, inputs], found.order, out)
        if isinstance(self.piece, Table) and self.piece.scale != 1.0:
            out.mul_(self.piece.scale)

    def blocks(self, part: int, rows: range, inputs: range) -> Tensor:
        name, found = self._find(part, rows)
        if not hasattr(self.checkpoint, "blocks"):  # a protocol's isinstance takes longer than a small matrix
            raise InternalError(f"{self.checkpoint.where(name)}: tensor {name!r} has no blocks")
        checkpoint = cast(BlockCheckpoint, self.checkpoint)
        blocks = checkpoint.blocks(name, self._through_experts(name, found.read), inputs)
        return blocks if found.order is None else blocks[found.order]

    def fields(self, part: int, rows: range, inputs: range, device: torch.device) -> Mapping[str, Tensor]:
        name, found = self._find(part, rows)
        fields = self._quantised(name).fields(name, self._through_experts(name, found.read), inputs, device)
        if found.order is None:
            return fields
        order = found.order.to(device)
        return {field: values[order] for field, values in fields.items()}

    def order(self, part: int) -> Tensor:
        name, _ = self._find(part, range(0))
        return self._quantised(name).order(name, self.expert)

    def _quantised(self, name: str) -> QuantisedCheckpoint:
        if not hasattr(self.checkpoint, "fields"):
            raise InternalError(f"{self.checkpoint.where(name)}: tensor {name!r} has no codes")
        return cast(QuantisedCheckpoint, self.checkpoint)

    def _read(self, name: str, ranges: list[range], order: Tensor | None, out: Tensor) -> None:
        """Reads `ranges` of a tensor into `out`: of the expert's matrix, where those of all experts are one tensor."""
        target = out if order is None else torch.empty((len(ranges[0]), *out.shape[1:]), dtype=out.dtype)
        if self._is_stacked:
            self.checkpoint.read(name, [range(self.expert, self.expert + 1), *ranges], target.unsqueeze(0))
        else:
            self.checkpoint.read(name, ranges, target)
        if order is not None:
            torch.index_select(target, 0, order, out=out)

    def _through_experts(self, name: str, rows: range) -> range:
        """Rows of the expert's matrix, counted through those of all experts where they are one tensor."""
        first = self.expert * self.checkpoint.shape(name)[1] if self._is_stacked else 0
        return range(first + rows.start, first + rows.stop, rows.step)

    @property
    def _is_stacked(self) -> bool:
        has_experts = isinstance(self.piece, Linear) and self.piece.experts is not None
        name, naming = f"{self.piece.parts[0].name}.weight", self.checkpoint.naming
        return has_experts and not self.weights.is_by_expert(name, naming)

    def _find(self, part: int, rows: range, suffix: str = "weight") -> tuple[str, _Rows]:
        """The checkpoint's name of a part, and which of its rows these are: parts that are one tensor there lie below
        each other."""
        naming, parts = self.checkpoint.naming, self.piece.parts
        names = [self.weights.foreign(f"{each.name}.{suffix}", naming, self.expert) for each in parts]
        if self.weights.alternates(f"{parts[part].name}.{suffix}", naming):
            return names[part], self._every_other(part, rows, names)
        above = sum(each.rows.size for each, name in zip(parts[:part], names, strict=False) if name == names[part])
        axis, start = parts[part].rows, self.shard.part(parts[part].rows).start
        wanted = range(start + rows.start, start + rows.stop)
        turned = parts[part].rotary_dim if self.weights.is_interleaved(naming) else 0
        return names[part], _foreign_rows(wanted, axis, turned, above, parts[part].rotary_start)

    def _every_other(self, part: int, rows: range, names: list[str]) -> _Rows:
        """Where these rows of a part are that has every second, say, of a tensor's."""
        start, among = self.shard.part(self.piece.parts[part].rows).start, names.count(names[part])
        if not rows:
            return _Rows(range(0))
        first, last = ((start + row) * among + names[:part].count(names[part]) for row in (rows[0], rows[-1]))
        return _Rows(range(first, last + 1, among))


def read_vector(shard: Shard, weights: WeightMap, checkpoint: Checkpoint, vector: Vector, out: Tensor) -> None:
    """This rank's part of a vector into `out`."""
    naming, stem = checkpoint.naming, vector.name
    turned = vector.rotary_dim if weights.is_interleaved(naming) else 0
    found = _foreign_rows(shard.part(vector.axis), vector.axis, turned, 0)
    target = out if found.order is None else torch.empty(len(found.read), dtype=out.dtype)
    checkpoint.read(weights.foreign(stem, naming), [found.read], target)
    if found.order is not None:
        torch.index_select(target, 0, found.order, out=out)
    if offset := weights.offset(stem, naming):
        out.add_(offset)
    if vector.scale != 1.0:
        out.mul_(vector.scale)
