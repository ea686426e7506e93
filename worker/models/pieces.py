"""Pieces: the weights of a model by canonical name, with their dimensions and how each splits over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TP = "tp"
"""The process group of tensor parallelism: columns of an MLP, rows of the vocabulary."""
ATTENTION = "attention"
"""The process group whose ranks share out heads: that of tensor parallelism, or with data-parallel attention each rank
alone."""
EP = "ep"
"""The process group of expert parallelism: whole experts."""
ETP = "etp"
"""The process group whose ranks share the columns of each expert."""
PP = "pp"
"""The process group of pipeline parallelism: whole layers."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a weight in the whole model: `count` units (heads, columns, experts) of `unit` elements each."""

    count: int
    unit: int = 1
    group: str = ""
    """The process group whose ranks share the units out, contiguously and evenly; empty: every rank holds all."""
    readers: int = 0
    """With it a rank holds the units that its share of so many readers reads, in equal runs: KV heads are read by
    query heads. Neighbouring ranks may hold the same one."""

    @property
    def size(self) -> int:
        """Elements."""
        return self.count * self.unit


@dataclass(frozen=True, slots=True)
class Part:
    """One canonical weight of a linear layer, `name` without suffix. Its outputs are `rows`."""

    name: str
    rows: Axis
    rotary_dim: int = 0
    """The number of elements of each unit (head) that the rotary embedding turns: a checkpoint may hold their pairs
    interleaved."""
    rotary_start: int = 0
    """The number of elements of each unit before those."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer; its parts are stacked along the output."""

    name: str
    parts: tuple[Part, ...]
    inputs: Axis
    has_bias: bool = False
    is_gated: bool = False
    """Two parts of one size (gate and up), whose outputs are used pair by pair."""
    experts: Axis | None = None
    """Every expert has such a layer: its tensors get a leading dimension, this rank's experts."""
    is_exact: bool = False
    """It is held in float32, whatever the method of other layers."""
    has_unit_rows: bool = False
    """Each row of the weight is held divided by its Euclidean norm; its inputs are not split."""
    key_rows: int = 0
    """Each head (unit of the rows) has so many rows of keys, then those of values, which are held apart and head by
    head: `allspan.worker.quant.by_head`. 0: an ordinary layer."""

    @property
    def sums_ranks(self) -> bool:
        """Its input is split, so that ranks add their outputs: only the first adds the bias. Or its experts are."""
        return bool(self.inputs.group) or (self.experts is not None and bool(self.experts.group))


@dataclass(frozen=True, slots=True)
class Vector:
    """One number for each unit of an axis, float32: a norm's weight, the sinks of query heads. It is held as `scale`
    times what the checkpoint says."""

    name: str
    axis: Axis
    scale: float = 1.0
    rotary_dim: int = 0
    """See `Part.rotary_dim`."""


@dataclass(frozen=True, slots=True)
class Table:
    """The embedding, this rank's rows of the vocabulary: a linear layer whose columns are looked up, and with tied
    embeddings the head too. It is held as `scale` times what the checkpoint says."""

    name: str
    rows: Axis
    inputs: Axis
    scale: float = 1.0

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(self.name, self.rows),)


Piece = Linear | Vector | Table


def tensors_of(piece: Piece) -> Iterator[tuple[str, tuple[Axis, ...]]]:
    """The canonical tensors of a piece and their dimensions: [out, in] for a matrix, behind those of an expert."""
    if isinstance(piece, Vector):
        yield piece.name, (piece.axis,)
        return
    experts = (piece.experts,) if isinstance(piece, Linear) and piece.experts is not None else ()
    for part in piece.parts:
        yield f"{part.name}.weight", (*experts, part.rows, piece.inputs)
        if isinstance(piece, Linear) and piece.has_bias:
            yield f"{part.name}.bias", (*experts, part.rows)
