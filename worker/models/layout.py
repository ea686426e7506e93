"""The weights of a decoder: which linear layers and vectors it has, how much of each a rank holds, and reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from allspan.kernels.packing import Packer
from allspan.protos.api.errors import InternalError
from allspan.worker.models.shard import Shard
from allspan.worker.models.spec import ModelSpec
from allspan.worker.process.release_memory import anonymous
from allspan.worker.program.program import ProgramBuilder, Slot
from allspan.worker.quant.base import Epilogue, HeldTensor, LinearMethod, LinearShape
from allspan.worker.weights.checkpoint import BlockCheckpoint, Checkpoint, QuantisedCheckpoint
from allspan.worker.weights.weight_map import Dim, WeightMap

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) of this rank's weights."""

IGNORED_TENSORS = ("rotary_emb.inv_freq", "rope_freqs.weight")
"""Left over in some checkpoints: tables that are computed (or read with the config) anyway."""


_ALIGNMENT = 128
"""Bytes: of a pair of cache lines, which the processor fetches together."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer; `parts` are canonical weights without suffix, stacked along the output."""

    name: str
    parts: tuple[str, ...]
    has_bias: bool = False
    sums_ranks: bool = False
    """Its input is split, so that ranks add their outputs: only rank 0 adds the bias."""
    interleaved: bool = False
    """Two parts of one size, whose outputs are used pair by pair."""


@dataclass(frozen=True, slots=True)
class Vector:
    """A norm's weight, float32 and replicated."""

    name: str


@dataclass(frozen=True, slots=True)
class Table:
    """The embedding, this rank's rows of the vocabulary: a linear layer whose columns are looked up, and with tied
    embeddings the head too."""

    name: str

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name,)


Piece = Linear | Vector | Table

EMBEDDING = Table("embedding")
HEAD = Linear("lm_head", ("lm_head",))


def layout(spec: ModelSpec) -> tuple[Piece, ...]:
    """Everything that a model of this spec holds, in the order in which it is read."""
    pieces: list[Piece] = [EMBEDDING]
    for i in range(spec.num_layers):
        pieces += layer_pieces(spec, f"layers.{i}.")
    pieces.append(Vector("norm.weight"))
    if not spec.tie_word_embeddings:
        pieces.append(HEAD)
    return tuple(pieces)


def qkv_linear(spec: ModelSpec, layer: int) -> Linear:
    """Queries, keys and values of a layer, in one."""
    return _qkv(spec, f"layers.{layer}.")


def _qkv(spec: ModelSpec, prefix: str) -> Linear:
    return Linear(prefix + "qkv", (prefix + "q", prefix + "k", prefix + "v"), spec.qkv_bias)


def layer_pieces(spec: ModelSpec, prefix: str) -> list[Piece]:
    pieces: list[Piece] = [Vector(prefix + "input_norm.weight")]
    pieces.append(_qkv(spec, prefix))
    if spec.qk_norm:
        pieces += [Vector(prefix + "q_norm.weight"), Vector(prefix + "k_norm.weight")]
    pieces.append(Linear(prefix + "o", (prefix + "o",), spec.output_bias, sums_ranks=True))
    pieces.append(Vector(prefix + "mlp_norm.weight"))
    pieces.append(Linear(prefix + "gate_up", (prefix + "gate", prefix + "up"), spec.mlp_bias, interleaved=True))
    pieces.append(Linear(prefix + "down", (prefix + "down",), spec.mlp_bias, sums_ranks=True))
    return pieces


def canonical_names(spec: ModelSpec) -> Iterator[str]:
    """Every tensor of the model, whichever rank reads it."""
    for piece in layout(spec):
        if isinstance(piece, Vector):
            yield piece.name
            continue
        for part in piece.parts:
            yield f"{part}.weight"
            if isinstance(piece, Linear) and piece.has_bias:
                yield f"{part}.bias"


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
    stored: Mapping[str, str] = field(default_factory=dict)
    """The type of each tensor of a quantised checkpoint, by its own names; empty for others."""
    quantization: str = "none"
    """The name of `method`."""
    packer: Packer = field(default_factory=Packer)
    """Packs the weights that are read, on its threads."""
    memory: str = "panels"
    """How packed weights lie: `allspan.kernels.packed.MEMORIES`."""

    def shape_of(self, piece: Linear | Table) -> LinearShape:
        """What this rank holds of a layer."""
        dims = [self.weights.dims(f"{part}.weight") for part in piece.parts]
        linear = piece if isinstance(piece, Linear) else None
        has_bias = linear is not None and linear.has_bias and not (linear.sums_ranks and self.shard.rank > 0)
        return LinearShape(
            parts=tuple(len(self.shard.part(rows)) for rows, _ in dims),
            inputs=self.shard.part(dims[0][1]),
            all_inputs=self.shard.full(dims[0][1]),
            has_bias=has_bias,
            interleaved=linear is not None and linear.interleaved,
            is_vocabulary=dims[0][0] is Dim.VOCABULARY,
            is_head=piece == (EMBEDDING if self.shard.spec.tie_word_embeddings else HEAD),
            stored=tuple(self._kind(f"{part}.weight") for part in piece.parts) if self.stored else (),
            memory=self.memory,
        )

    def _kind(self, name: str) -> str:
        """How the checkpoint has stored a canonical tensor."""
        foreign = (self.weights.foreign(name, naming) for naming in ("gguf", "hugging_face"))
        return next((self.stored[each] for each in foreign if each in self.stored), "")

    def tensors(self, piece: Piece) -> dict[str, HeldTensor]:
        """Canonical name → shape and dtype."""
        if isinstance(piece, Vector):
            shape = tuple(len(self.shard.part(dim)) for dim in self.weights.dims(piece.name))
            return {piece.name: HeldTensor(shape, torch.float32)}
        held = self.method.tensors(self.shape_of(piece))
        return {f"{piece.name}.{suffix}": tensor for suffix, tensor in held.items()}

    @property
    def num_bytes(self) -> int:
        pieces = layout(self.shard.spec)
        return sum(tensor.num_bytes for piece in pieces for tensor in self.tensors(piece).values())

    def emit(
        self,
        program: ProgramBuilder,
        piece: Linear | Table,
        x: Slot,
        out: Slot,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        """Appends the product of x and the layer's weight; of the embedding, that with the head that is tied to it."""
        self.method.emit(program, self.shape_of(piece), self._slots(program, piece), x, out, epilogue)

    def emit_embedding(self, program: ProgramBuilder, ids: Slot, out: Slot) -> None:
        """Appends out = this rank's rows of the embedding, 0 for ids of others."""
        first = self.shard.vocabulary.start
        slots = self._slots(program, EMBEDDING)
        self.method.emit_embedding(program, self.shape_of(EMBEDDING), slots, ids, first, out)

    def bias(self, tensors: Mapping[str, Tensor], piece: Linear, part: int) -> Tensor:
        """The bias of one part, float32 [outputs], of the tensors that `read` gave."""
        start = f"{piece.name}.bias"
        biases = torch.cat([tensors[name] for name in self.tensors(piece) if name.startswith(start)])
        return torch.split(biases, list(self.shape_of(piece).parts))[part]

    def _slots(self, program: ProgramBuilder, piece: Linear | Table) -> dict[str, Slot]:
        return {name.removeprefix(piece.name + "."): program.named(name) for name in self.tensors(piece)}

    def read(
        self,
        checkpoint: Checkpoint,
        device: str,
        on_progress: Progress | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Reads this rank's slices: canonical name → tensor on `device`; `into` are the tensors of an earlier reading,
        to be filled again where they lie."""
        done, total = 0, self.num_bytes
        held: dict[str, Tensor] = {}
        if into is None and device == "cpu":
            into = self._memory()
        for piece in layout(self.shard.spec):
            declared = self.tensors(piece)
            tensors: dict[str, Tensor] = {}
            for name, t in declared.items():
                place = self._place(t, device)
                is_there = into is not None and into[name].device.type == place
                tensors[name] = into[name] if into and is_there else torch.zeros(t.shape, dtype=t.dtype, device=place)
            self._fill(piece, checkpoint, tensors)
            checkpoint.release()
            done += sum(tensor.nbytes for tensor in tensors.values())
            for name, tensor in tensors.items():
                is_copied = into is not None and into[name] is not tensor
                held[name] = into[name].copy_(tensor) if into and is_copied else tensor.to(device)
            if on_progress is not None:
                on_progress(done, total)
        return held

    def _place(self, tensor: HeldTensor, device: str) -> str:
        """Where a tensor is filled: packed rows on the device itself."""
        return device if self.memory == "rows" and tensor.dtype is torch.uint8 else "cpu"

    def _memory(self) -> dict[str, Tensor]:
        """Zeros for all that this rank holds, by name, in one stretch of memory."""
        declared = [item for piece in layout(self.shard.spec) for item in self.tensors(piece).items()]
        sizes = [-(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT for _, tensor in declared]
        parts = torch.split(anonymous(sum(sizes)), sizes)
        return {
            name: part[: tensor.num_bytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), part in zip(declared, parts, strict=True)
        }

    def _fill(self, piece: Piece, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
        if isinstance(piece, Vector):
            self._vector(checkpoint, piece.name, tensors[piece.name])
            return
        by_suffix = {name.removeprefix(piece.name + "."): tensor for name, tensor in tensors.items()}
        source = _Source(self, checkpoint, piece.parts)
        self.method.load(self.shape_of(piece), source, by_suffix, self.packer)

    def _vector(self, checkpoint: Checkpoint, name: str, out: Tensor) -> None:
        (dim,) = self.weights.dims(name)
        checkpoint.read(self.weights.foreign(name, checkpoint.naming), [self.shard.part(dim)], out)


@dataclass(frozen=True, slots=True)
class _Source:
    """See `allspan.worker.quant.base.Source`."""

    holding: Holding
    checkpoint: Checkpoint
    parts: tuple[str, ...]

    def bias(self, part: int, out: Tensor) -> None:
        self.holding._vector(self.checkpoint, f"{self.parts[part]}.bias", out)

    def floats(self, part: int, rows: range, inputs: range, out: Tensor) -> None:
        name, rows = self._find(part, rows)
        self.checkpoint.read(name, [rows, inputs], out)

    def blocks(self, part: int, rows: range, inputs: range) -> Tensor:
        name, rows = self._find(part, rows)
        if not isinstance(self.checkpoint, BlockCheckpoint):
            raise InternalError(f"{self.checkpoint.where(name)}: tensor {name!r} has no blocks")
        return self.checkpoint.blocks(name, rows, inputs)

    def fields(self, part: int, rows: range, inputs: range, device: torch.device) -> Mapping[str, Tensor]:
        name, rows = self._find(part, rows)
        return self._quantised(name).fields(name, rows, inputs, device)

    def order(self, part: int) -> Tensor:
        name, _ = self._find(part, range(0))
        return self._quantised(name).order(name)

    def _quantised(self, name: str) -> QuantisedCheckpoint:
        if not isinstance(self.checkpoint, QuantisedCheckpoint):
            raise InternalError(f"{self.checkpoint.where(name)}: tensor {name!r} has no codes")
        return self.checkpoint

    def _find(self, part: int, rows: range) -> tuple[str, range]:
        """The checkpoint's name of a part's weight, and which of its rows these are."""
        name = f"{self.parts[part]}.weight"
        first = self.holding.shard.part(self.holding.weights.dims(name)[0]).start
        foreign = self.holding.weights.foreign(name, self.checkpoint.naming)
        return foreign, range(first + rows.start, first + rows.stop)
