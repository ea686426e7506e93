"""The weights of a decoder: which linear layers and vectors it has, how much of each a rank holds, and reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from allspan.worker.models.shard import Shard
from allspan.worker.models.spec import ModelSpec
from allspan.worker.quant.base import HeldTensor, LinearMethod, LinearShape
from allspan.worker.weights.checkpoint import Checkpoint
from allspan.worker.weights.weight_map import Dim, WeightMap

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) of this rank's weights."""

IGNORED_TENSORS = ("rotary_emb.inv_freq", "rope_freqs.weight")
"""Left over in some checkpoints: tables that are computed (or read with the config) anyway."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer; `parts` are canonical weights without suffix, stacked along the output."""

    name: str
    parts: tuple[str, ...]
    has_bias: bool = False
    sums_ranks: bool = False
    """Its input is split, so that ranks add their outputs: only rank 0 adds the bias."""


@dataclass(frozen=True, slots=True)
class Vector:
    """A norm's weight, float32 and replicated."""

    name: str


@dataclass(frozen=True, slots=True)
class Table:
    """The embedding, this rank's rows of the vocabulary, in the weights' dtype."""

    name: str


Piece = Linear | Vector | Table


def layout(spec: ModelSpec) -> tuple[Piece, ...]:
    """Everything that a model of this spec holds, in the order in which it is read."""
    pieces: list[Piece] = [Table("embedding.weight")]
    for i in range(spec.num_layers):
        pieces += layer_pieces(spec, f"layers.{i}.")
    pieces.append(Vector("norm.weight"))
    if not spec.tie_word_embeddings:
        pieces.append(Linear("lm_head", ("lm_head",)))
    return tuple(pieces)


def layer_pieces(spec: ModelSpec, prefix: str) -> list[Piece]:
    pieces: list[Piece] = [Vector(prefix + "input_norm.weight")]
    pieces += [Linear(prefix + name, (prefix + name,), spec.qkv_bias) for name in ("q", "k", "v")]
    if spec.qk_norm:
        pieces += [Vector(prefix + "q_norm.weight"), Vector(prefix + "k_norm.weight")]
    pieces.append(Linear(prefix + "o", (prefix + "o",), spec.output_bias, sums_ranks=True))
    pieces.append(Vector(prefix + "mlp_norm.weight"))
    pieces.append(Linear(prefix + "gate_up", (prefix + "gate", prefix + "up"), spec.mlp_bias))
    pieces.append(Linear(prefix + "down", (prefix + "down",), spec.mlp_bias, sums_ranks=True))
    return pieces


def canonical_names(spec: ModelSpec) -> Iterator[str]:
    """Every tensor of the model, whichever rank reads it."""
    for piece in layout(spec):
        if isinstance(piece, Linear):
            for part in piece.parts:
                yield f"{part}.weight"
                if piece.has_bias:
                    yield f"{part}.bias"
        else:
            yield piece.name


def expected_shapes(shard: Shard, weights: WeightMap, naming: str) -> dict[str, tuple[int, ...]]:
    """Checkpoint name → shape of the whole tensor."""
    return {
        weights.foreign(name, naming): tuple(shard.full(dim) for dim in weights.dims(name))
        for name in canonical_names(shard.spec)
    }


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank's part of a model: what it holds under which name, without holding it yet."""

    shard: Shard
    weights: WeightMap
    method: LinearMethod
    dtype: torch.dtype

    def shape_of(self, linear: Linear) -> LinearShape:
        dims = [self.weights.dims(f"{part}.weight") for part in linear.parts]
        return LinearShape(
            part_rows=tuple(len(self.shard.part(rows)) for rows, _ in dims),
            in_features=len(self.shard.part(dims[0][1])),
            has_bias=linear.has_bias and not (linear.sums_ranks and self.shard.rank > 0),
        )

    def tensors(self, piece: Piece) -> dict[str, HeldTensor]:
        """Canonical name → shape and dtype."""
        if isinstance(piece, Linear):
            held = self.method.tensors(self.shape_of(piece))
            return {f"{piece.name}.{suffix}": tensor for suffix, tensor in held.items()}
        dtype = self.dtype if isinstance(piece, Table) else torch.float32
        shape = tuple(len(self.shard.part(dim)) for dim in self.weights.dims(piece.name))
        return {piece.name: HeldTensor(shape, dtype)}

    @property
    def num_bytes(self) -> int:
        pieces = layout(self.shard.spec)
        return sum(tensor.num_bytes for piece in pieces for tensor in self.tensors(piece).values())

    def read(
        self,
        checkpoint: Checkpoint,
        device: str,
        on_progress: Progress | None,
        into: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Reads this rank's slices: canonical name → tensor on `device`; `into` are the tensors of an earlier reading,
        on the CPU, to be filled again where they lie."""
        done, total = 0, self.num_bytes
        held: dict[str, Tensor] = {}
        for piece in layout(self.shard.spec):
            declared = self.tensors(piece)
            tensors = {
                name: torch.empty(t.shape, dtype=t.dtype) if into is None else into[name]
                for name, t in declared.items()
            }
            self._fill(piece, checkpoint, tensors)
            checkpoint.release()
            done += sum(tensor.nbytes for tensor in tensors.values())
            held.update({name: tensor.to(device) for name, tensor in tensors.items()})
            if on_progress is not None:
                on_progress(done, total)
        return held

    def _fill(self, piece: Piece, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
        if not isinstance(piece, Linear):
            self._read_one(checkpoint, piece.name, tensors[piece.name])
            return
        parts = piece.parts

        def read(part: int, suffix: str, out: Tensor) -> None:
            self._read_one(checkpoint, f"{parts[part]}.{suffix}", out)

        by_suffix = {name.removeprefix(piece.name + "."): tensor for name, tensor in tensors.items()}
        self.method.load(self.shape_of(piece), read, by_suffix)

    def _read_one(self, checkpoint: Checkpoint, name: str, out: Tensor) -> None:
        dims: tuple[Dim, ...] = self.weights.dims(name)
        ranges = [self.shard.part(dim) for dim in dims]
        checkpoint.read(self.weights.foreign(name, checkpoint.naming), ranges, out)
