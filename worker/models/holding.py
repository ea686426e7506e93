"""Holding: what one rank holds of a model, and reading it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from allspan.kernels.packer import Packer
from allspan.protos.api.errors import ConfigError
from allspan.worker.models.layout import embedding_of, head_of, held_layout
from allspan.worker.models.pieces import EP, Axis, Linear, Piece, Table, Vector
from allspan.worker.models.placement import Placement, numbered
from allspan.worker.models.shard import Shard
from allspan.worker.models.source import PieceSource, read_vector
from allspan.worker.models.spec import HeadSpec, ModelSpec
from allspan.worker.program.program import ProgramBuilder, Slot
from allspan.worker.quant.base import Epilogue, LinearDelta, LinearMethod, LinearShape
from allspan.worker.quant.by_head import ByHead
from allspan.worker.quant.exact import Exact
from allspan.worker.quant.experts import ExpertProducts, Packs
from allspan.worker.step.backend import HOST
from allspan.worker.weights.checkpoint import Checkpoint
from allspan.worker.weights.held_tensor import HeldTensor, host_zeros
from allspan.worker.weights.quantised_matrix import joint_kind
from allspan.worker.weights.weight_map import WeightMap

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) of this rank's weights."""

_EXACT = Exact()
_NAMINGS = "gguf", "hugging_face"


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank's part of a model: what it holds under which name, without holding it yet."""

    spec: ModelSpec
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
    """How packed weights lie: `allspan.kernels.packed_spec.MEMORIES`."""
    placements: dict[int, Placement] = field(default_factory=dict)
    """Which groups of ranks hold which experts, by layer; changed where experts move while the model runs. A layer that
    is missing has its experts in the order of their numbers."""
    delta: LinearDelta | None = None
    """What is added to products of linear layers."""
    target: Holding | None = None
    """What the rank holds of the target of a draft head, with the embedding and the head that this may lack."""
    expert_kinds: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `_kind` has found of tensors that many experts have."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What the rank holds parts of, in the order in which it is read."""
        return held_layout(self.spec, self.shard)

    def shape_of(self, piece: Linear | Table) -> LinearShape:
        """What this rank holds of a layer; of one that every expert has, what it holds of one of them."""
        linear = piece if isinstance(piece, Linear) else None
        has_bias = linear is not None and linear.has_bias and self._is_first(linear.inputs)
        embedding, head = embedding_of(self.spec), head_of(self.spec)
        return LinearShape(
            parts=tuple(len(self.shard.part(part.rows)) for part in piece.parts),
            inputs=self.shard.part(piece.inputs),
            all_inputs=piece.inputs.size,
            has_bias=has_bias,
            interleaved=linear is not None and linear.is_gated,
            is_vocabulary=piece.name in (embedding.name, head.name),
            is_head=piece.name == (embedding if self.spec.tie_word_embeddings else head).name,
            stored=tuple(self._kind(piece, f"{part.name}.weight") for part in piece.parts) if self.stored else (),
            memory=self.memory,
        )

    def _is_first(self, axis: Axis) -> bool:
        """Whether the rank is the first of those that share an axis."""
        return not axis.group or self.shard.groups[axis.group].is_first

    def _method(self, piece: Linear | Table) -> LinearMethod:
        if isinstance(piece, Linear) and piece.key_rows:
            return ByHead(piece.parts[0].rows.unit, piece.key_rows, self.dtype)
        return _EXACT if isinstance(piece, Linear) and piece.is_exact else self.method

    def _kind(self, piece: Linear | Table, name: str) -> str:
        """How the checkpoint has stored a canonical tensor; one that is scaled or normalised is read as
        floats."""
        is_scaled = isinstance(piece, Table) and piece.scale != 1.0
        if is_scaled or (isinstance(piece, Linear) and piece.has_unit_rows):
            return ""
        naming = next((each for each in _NAMINGS if self.weights.foreign(name, each) in self.stored), "")
        if not naming:
            return ""
        if not isinstance(piece, Linear) or piece.experts is None:
            return self.stored[self.weights.foreign(name, naming)]
        if name not in self.expert_kinds:
            foreign = self.weights.of_experts(name, naming, piece.experts.count)
            self.expert_kinds[name] = joint_kind([self.stored.get(each, "") for each in foreign])
        return self.expert_kinds[name]

    def placement(self, layer: int, num_experts: int) -> Placement:
        """Which groups of ranks hold which of a layer's experts."""
        return self.placements.get(layer) or numbered(num_experts, self.shard.groups[EP].size)

    def _held_experts(self, piece: Linear, experts: Axis) -> tuple[int, ...]:
        """The experts of which this rank holds the layer, by place."""
        layer = int(piece.name.split(".")[1])  # layers.N.…
        return self.placement(layer, experts.count).groups[self.shard.groups[EP].rank]

    def tensors(self, piece: Piece) -> dict[str, HeldTensor]:
        """Canonical name → shape and dtype."""
        if isinstance(piece, Vector):
            return {piece.name: HeldTensor((len(self.shard.part(piece.axis)),), torch.float32)}
        held = self._method(piece).tensors(self.shape_of(piece))
        if isinstance(piece, Linear) and piece.experts is not None:
            experts = len(self._held_experts(piece, piece.experts))
            held = {name: HeldTensor((experts, *tensor.shape), tensor.dtype) for name, tensor in held.items()}
        return {f"{piece.name}.{suffix}": tensor for suffix, tensor in held.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for piece in self.pieces for tensor in self.tensors(piece).values())

    def emit(
        self,
        program: ProgramBuilder,
        piece: Linear | Table,
        x: Slot,
        out: Slot,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        """Appends the product of x and the layer's weight; of the embedding, that with the head that is tied to it. A
        delta lies between the product and its activation, which is an op of its own then."""
        method, shape, weights = self._method(piece), self.shape_of(piece), self._slots(program, piece)
        layer = head_of(self.spec).name if isinstance(piece, Table) else piece.name
        if self.delta is None or not self.delta.has(layer):
            method.emit(program, shape, weights, x, out, epilogue)
            return
        low = self.delta.shrink(program, layer, x)
        if epilogue.activation:
            product = program.scratch("adapted", out, shape.outputs)
            method.emit(program, shape, weights, x, product)
            self.delta.expand(program, layer, low, product)
            epilogue.finish(program, product, out)
        else:
            method.emit(program, shape, weights, x, out, epilogue)
            self.delta.expand(program, layer, low, out)

    def experts(self, program: ProgramBuilder, piece: Linear) -> ExpertProducts:
        """What appends the products of a layer that every expert has. Raises ConfigError for a method whose weights are
        not packed."""
        if not isinstance(self.method, Packs):
            raise ConfigError(f"quantization {self.quantization!r} has no experts: use another one")
        return ExpertProducts(program, self.method, self.shape_of(piece), self._slots(program, piece))

    def emit_embedding(self, program: ProgramBuilder, ids: Slot, out: Slot) -> None:
        """Appends out = this rank's rows of the embedding, 0 for ids of others."""
        if self.target is not None and isinstance(self.spec, HeadSpec) and not self.spec.has_embedding:
            self.target.emit_embedding(program, ids, out)
            return
        table = embedding_of(self.spec)
        first, slots = self.shard.part(table.rows).start, self._slots(program, table)
        self.method.emit_embedding(program, self.shape_of(table), slots, ids, first, out)
        if self.delta is not None and self.delta.has(table.name):
            low = self.delta.embed(program, table.name, ids, first)
            self.delta.expand(program, table.name, low, out)

    def emit_logits(self, program: ProgramBuilder, x: Slot, out: Slot) -> None:
        """Appends out = this rank's columns of the logits of x."""
        if self.target is not None and isinstance(self.spec, HeadSpec) and not self.spec.has_head:
            self.target.emit_logits(program, x, out)
        else:
            tied = self.spec.tie_word_embeddings
            self.emit(program, embedding_of(self.spec) if tied else head_of(self.spec), x, out)

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
        if into is None and device == HOST:
            into = host_zeros({name: t for piece in self.pieces for name, t in self.tensors(piece).items()})
        for piece in self.pieces:
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
        return device if self.memory == "rows" and tensor.dtype is torch.uint8 else HOST

    def _fill(self, piece: Piece, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
        if isinstance(piece, Vector):
            read_vector(self.shard, self.weights, checkpoint, piece, tensors[piece.name])
            return
        shape = self.shape_of(piece)
        by_suffix = {name.removeprefix(piece.name + "."): tensor for name, tensor in tensors.items()}
        if not isinstance(piece, Linear) or piece.experts is None:
            source = PieceSource(self.shard, self.weights, checkpoint, piece)
            self._method(piece).load(shape, source, by_suffix, self.packer)
            return
        for place, expert in enumerate(self._held_experts(piece, piece.experts)):
            self._fill_expert(piece, expert, checkpoint, {name: tensor[place] for name, tensor in by_suffix.items()})

    def expert_pieces(self, layer: int) -> tuple[Linear, ...]:
        """The linear layers that every expert of a layer has."""
        linears = (piece for piece in self.pieces if isinstance(piece, Linear) and piece.experts is not None)
        return tuple(piece for piece in linears if piece.name.startswith(f"layers.{layer}."))

    def read_expert(
        self, piece: Linear, expert: int, checkpoint: Checkpoint, like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """This rank's part of one expert's layer, in new tensors like these, by canonical name."""
        declared = self.tensors(piece)
        read = {
            name: torch.zeros(own.shape, dtype=own.dtype, device=self._place(declared[name], str(own.device)))
            for name, own in like.items()
        }
        by_suffix = {name.removeprefix(piece.name + "."): tensor for name, tensor in read.items()}
        self._fill_expert(piece, expert, checkpoint, by_suffix)
        return read

    def _fill_expert(self, piece: Linear, expert: int, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
        """Reads this rank's part of one expert's layer into `tensors`, by suffix."""
        source = PieceSource(self.shard, self.weights, checkpoint, piece, expert)
        self.method.load(self.shape_of(piece), source, tensors, self.packer)
