"""AdapterSlots: the matrices of a model's adapters, held side by side for each linear layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from allspan.kernels.adapter_layout import COLUMNS, panels_of, put_rows
from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.packer import Packer, Target
from allspan.protos.api.errors import AdapterRank, CheckpointError
from allspan.protos.model_files.regular_file import Opener, open_regular
from allspan.worker.adapters.peft_folder import LowRank, OutputRows, PeftFolder
from allspan.worker.adapters.staged import Put, StagedAdapter, checksum_of, checksum_of_all
from allspan.worker.models.holding import Holding
from allspan.worker.models.layout import expected_shapes, head_of, layout, lookup_of
from allspan.worker.models.pieces import Linear, Piece, Table
from allspan.worker.models.source import PieceSource
from allspan.worker.models.spec import ModelSpec
from allspan.worker.program.program import ProgramBuilder, Rows, Slot
from allspan.worker.step.backend import HOST
from allspan.worker.weights.held_tensor import HeldTensor, host_zeros

_NAMING = "hugging_face"
_GIVEN_UP = StagedAdapter({}, "")
_FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer that adapters may change, as this rank holds it."""

    piece: Linear
    parts: tuple[int, ...]
    """The outputs of each part."""
    packed: PackedSpec | None
    """How the first matrix lies: one part, of `rank` features for each part of the layer. None, of the embedding: a row
    for each of this rank's tokens."""
    a: HeldTensor
    """One adapter's first matrix."""
    b: HeldTensor
    """The panels of one adapter's second matrix."""

    def tensors(self, slots: int) -> dict[str, HeldTensor]:
        """The first matrices of all adapters, and what `AdapterWeights` has."""
        held = {
            "a": HeldTensor((slots, *self.a.shape), self.a.dtype),
            "b": HeldTensor((slots, *self.b.shape), self.b.dtype),
            "ranks": HeldTensor((slots, len(self.parts)), torch.int32),
            "ends": HeldTensor((len(self.parts),), torch.int32),
        }
        return {f"{self.piece.name}.adapter_{name}": tensor for name, tensor in held.items()}


class AdapterSlots:
    """A LinearDelta (`allspan.worker.quant.base`): `count` slots for adapters of ranks up to `rank`. What lies behind
    an adapter's rank is never used.

    Ranks hold what goes with their part of the layer: all of a where the layer's outputs are split and their rows of
    b, or their columns of a and all of b where its inputs are. So the sums over ranks that layers have anyway are all
    that adapters need.
    """

    def __init__(self, holding: Holding, count: int, rank: int, packer: Packer | None = None) -> None:
        """`packer`: packs while steps run; None: the one of the weights, which must not."""
        self._holding = replace(holding, delta=None, packer=packer or holding.packer)
        self._rank, self.num_slots = rank, count
        self._layers = {piece.name: self._layer(piece) for piece in self._held()}
        self.tensors: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots on this rank."""
        held = (tensor for layer in self._layers.values() for tensor in layer.tensors(self.num_slots).values())
        return sum(tensor.num_bytes for tensor in held)

    def allocate(self, device: str) -> None:
        """Makes the tensors, of adapters that change nothing."""
        declared = {k: held for layer in self._layers.values() for k, held in layer.tensors(self.num_slots).items()}
        if device == HOST:
            self.tensors = host_zeros(declared)
        else:
            self.tensors = {k: torch.zeros(held.shape, dtype=held.dtype, device=device) for k, held in declared.items()}
        for layer in self._layers.values():
            ends = torch.tensor(layer.parts, dtype=torch.int32).cumsum(0)
            self.tensors[f"{layer.piece.name}.adapter_ends"].copy_(ends)

    def check(self, path: Path, opener: Opener = open_regular) -> PeftFolder:
        """Opens a folder of PEFT's. Raises CheckpointError for an adapter of another model, for one that is not
        supported, and for a higher rank than slots have."""
        folder = PeftFolder(path, opener)
        self._check(folder)
        return folder

    def stage(
        self,
        path: Path,
        goes_on: Callable[[], bool] = lambda: True,
        opener: Opener = open_regular,
        put: Put | None = None,
    ) -> StagedAdapter:
        """Reads a folder of PEFT's into host memory, for `write` to put it into a slot; with `put` that gets the
        tensors, layer by layer, and only those of one layer are held. Without tensors where `goes_on` said no. Raises
        CheckpointError as `check` does, and for numbers that are not finite."""
        folder = self.check(path, opener)
        staged: dict[str, Tensor] = {}
        told: dict[str, str] = {}

        def read(modules: Iterable[str]) -> dict[str, LowRank]:
            found = {}
            for module in modules:
                found[module] = folder.matrices(module, self._holding.dtype, self._factors.get(module, 1.0))
                told[module] = told.get(module) or checksum_of(found[module])
            return found

        for layer in self._layers.values():
            if not goes_on():
                return _GIVEN_UP
            modules = dict.fromkeys(self._module(part.name) for part in layer.piece.parts)
            own = self._staged(layer, folder, read(module for module in modules if module in folder.modules))
            (put or staged.update)(own)
        read(module for module in folder.modules if module not in told)  # layers of other ranks
        if any(tensor.device.type != HOST for tensor in self.tensors.values()):  # `write` waits for no copy to a GPU
            staged = {name: tensor.pin_memory() for name, tensor in staged.items()}
        return StagedAdapter(staged, checksum_of_all(told))

    def write(self, slot: int, staged: StagedAdapter) -> None:
        """Puts an adapter, or a layer of it, into a slot: on a GPU in the stream that is current, behind what is queued
        there. Steps read no slot but those of their rows."""
        for name, tensor in staged.tensors.items():
            into = self.tensors[name][slot]
            # Nobody keeps other memory until a copy from it is over.
            into[tuple(map(slice, tensor.shape))].copy_(tensor, non_blocking=tensor.is_pinned())

    def load(self, slot: int, path: Path) -> None:
        """Reads a folder of PEFT's into a slot that no step reads. Raises as `stage` does."""
        self.stage(path, put=lambda tensors: self.write(slot, StagedAdapter(tensors, "")))

    def has(self, layer: str) -> bool:
        return layer in self._layers

    def shrink(self, program: ProgramBuilder, layer: str, x: Slot) -> Slot:
        held, rows = self._layers[layer], program.rows(x)
        assert held.packed is not None  # only the embedding's is not
        low = self._low(program, rows, held.packed.features)
        slots = program.view(low, 1, held.packed.features)
        program.op(
            "expert_linear", x, self._a(program, held), None, held.packed, 0, self._routing(program, rows), slots
        )
        return low

    def embed(self, program: ProgramBuilder, layer: str, ids: Slot, first_row: int) -> Slot:
        held = self._layers[layer]
        low = self._low(program, Rows.TOKENS, self._rank)
        program.op("embed_adapters", ids, program.input("adapters"), self._a(program, held), first_row, low)
        return low

    def expand(self, program: ProgramBuilder, layer: str, low: Slot, product: Slot) -> None:
        _, *names = self._layers[layer].tensors(self.num_slots)
        weights = AdapterWeights(*(program.named(name) for name in names))
        program.op("add_adapters", low, weights, self._routing(program, program.rows(low)), product)

    def _low(self, program: ProgramBuilder, rows: Rows, features: int) -> Slot:
        return program.buffer(f"adapter like {rows.value} {features}", rows, features, is_exact=True)

    def _a(self, program: ProgramBuilder, layer: _Layer) -> Slot:
        return program.named(next(iter(layer.tensors(self.num_slots))))

    def _routing(self, program: ProgramBuilder, rows: Rows) -> Routing[Slot]:
        """A step's rows sorted by their adapters, once for all layers."""
        return program.once(("adapters", rows), lambda: self._route(program, rows))

    def _route(self, program: ProgramBuilder, rows: Rows) -> Routing[Slot]:
        """Appends the op that sorts a step's rows."""
        name = f"adapters of {rows.value}"
        routing = Routing(
            program.buffer(f"{name}: places", rows, 1, is_integer=True),
            program.buffer(f"{name}: weights", rows, 1, is_exact=True),
            program.buffer(f"{name}: slots", rows, 1, is_integer=True),
            program.buffer(f"{name}: starts", Rows.ONE, self.num_slots + 1, is_integer=True),
        )
        numbers = {Rows.LOGITS: "logits_rows", Rows.OWN: "own_rows"}.get(rows)
        tokens = program.input(numbers, rows) if numbers is not None else None
        program.op("route_adapters", program.input("adapters"), tokens, routing)
        return routing

    def _held(self) -> Iterator[Linear]:
        """The layers of this rank that may be changed. An embedding that is the head, too, is one of both at either end
        of a pipeline."""
        spec, stage = self._holding.spec, self._holding.shard.stage
        others = {head_of(spec).name: stage.is_last, lookup_of(spec).name: stage.is_first}
        return (piece for piece in _changeable(self._holding.pieces, spec) if others.get(piece.name, True))

    def _layer(self, piece: Linear) -> _Layer:
        shape, dtype = self._holding.shape_of(piece), self._holding.dtype
        b = HeldTensor((panels_of(shape.parts), self._rank, COLUMNS), dtype)
        if piece.name == lookup_of(self._holding.spec).name:
            return _Layer(piece, shape.parts, None, HeldTensor((len(shape.inputs), self._rank), dtype), b)
        kind, features = _FORMATS[dtype], len(shape.parts) * self._rank
        packed = PackedSpec(kind, kind, (features,), len(shape.inputs), memory=shape.memory)
        return _Layer(piece, shape.parts, packed, HeldTensor(packed.shape, torch.uint8), b)

    def _staged(self, layer: _Layer, folder: PeftFolder, found: Mapping[str, LowRank]) -> dict[str, Tensor]:
        """What a slot of the layer is to hold, by the names of its tensors: of the second matrices as many ranks as one
        of them has, and of a layer that is not changed its ranks, 0, alone. Nothing is read that lies behind a rank."""
        holding, piece = self._holding, layer.piece
        name_a, name_b, name_ranks, _ = layer.tensors(self.num_slots)
        own = [found.get(self._module(part.name)) for part in piece.parts]
        ranks = [0 if matrices is None else matrices.rank for matrices in own]
        staged = {name_ranks: torch.tensor(ranks, dtype=torch.int32)}
        if not any(ranks):
            return staged
        inputs = holding.shard.part(piece.inputs)
        a = torch.zeros(len(ranks) * self._rank, len(inputs), dtype=holding.dtype)
        for number, matrices in enumerate(own):
            if matrices is not None:
                first = number * self._rank
                a[first : first + matrices.rank] = matrices.a[:, inputs.start : inputs.stop]
        source = PieceSource(holding.shard, holding.weights, OutputRows(folder, found), piece)
        panels = torch.empty(layer.b.shape[0], max(ranks), COLUMNS, dtype=holding.dtype)
        for number, (outputs, rank) in enumerate(zip(layer.parts, ranks, strict=True)):
            rows = torch.empty(outputs, rank, dtype=holding.dtype)
            if rank:
                source.floats(number, range(outputs), range(rank), rows)
            put_rows(rows, layer.parts, number, panels)
        return staged | {name_a: self._laid(layer, a), name_b: panels}

    def _laid(self, layer: _Layer, a: Tensor) -> Tensor:
        """A first matrix [R, inputs] as the layer's slots hold it."""
        if layer.packed is None:
            return a.T.contiguous()
        packed = torch.empty(layer.a.shape, dtype=torch.uint8)
        self._holding.packer.floats(a, Target(layer.packed, 0, 0, packed))
        return packed

    def _module(self, part: str) -> str:
        """The name of the module of Hugging Face's model that has a part's weight."""
        return self._holding.weights.foreign(f"{part}.weight", _NAMING).removesuffix(".weight")

    @cached_property
    def _embedding(self) -> str:
        """The module of the embedding."""
        return self._module(lookup_of(self._holding.spec).parts[0].name)

    @cached_property
    def _factors(self) -> Mapping[str, float]:
        """What the products of modules are multiplied by whose weights are held multiplied by it."""
        spec = self._holding.spec
        tied = [head_of(spec).parts[0].name] if spec.tie_word_embeddings else []
        return dict.fromkeys([self._embedding, *map(self._module, tied)], spec.embedding_scale)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Outputs and inputs of the modules that may be changed, of the whole model."""
        spec, weights = self._holding.spec, self._holding.weights
        shapes, found = expected_shapes(spec, weights, _NAMING), {}
        for piece in _changeable(layout(spec), spec):
            for part in piece.parts:
                own = part.rows.size, piece.inputs.size
                is_shared = piece.name in (lookup_of(spec).name, head_of(spec).name)
                module = self._module(part.name)
                found[module] = own if is_shared else shapes[f"{module}.weight"]
        return found

    def _check(self, folder: PeftFolder) -> None:
        if folder.rank > self._rank:
            raise AdapterRank(
                f"{folder.path}: the adapter has rank {folder.rank}, max_lora_rank is {self._rank}: raise it"
            )
        for module in folder.modules:
            if module not in self._shapes:
                raise CheckpointError(
                    f"{folder.path}: {module!r} is no layer of this model that an adapter may change: those are linear "
                    "layers of attention and MLP, the embedding and the head, not routers and experts"
                )
            if (module in folder.embeddings) != (module == self._embedding):
                raise CheckpointError(
                    f"{folder.path}: lora_embedding_A and lora_embedding_B are for the embedding, lora_A and lora_B "
                    f"for linear layers; {module!r} has the others"
                )
            if (actual := folder.shape(module)) != self._shapes[module]:
                raise CheckpointError(
                    f"{folder.path}: the adapter of {module!r} is for a weight of shape {list(actual)}, the model's "
                    f"has {list(self._shapes[module])}"
                )
        self._check_copies(folder)

    def _check_copies(self, folder: PeftFolder) -> None:
        """The base weights that PEFT saves beside adapters of the embedding and the head are this model's, by their
        shape: others are of a vocabulary that was made larger."""
        head = self._module(head_of(self._holding.spec).parts[0].name)
        for module, shape in folder.copies.items():
            if module not in (self._embedding, head) or module not in folder.modules:
                raise CheckpointError(
                    f"{folder.path}: base_layer.weight of {module!r} is not supported: it is for embeddings and heads "
                    "that have an adapter"
                )
            own = self._shapes[module] if module == head else self._shapes[module][::-1]
            if shape != own:
                raise CheckpointError(
                    f"{folder.path}: base_layer.weight of {module!r} has shape {list(shape)}, the model's {list(own)}: "
                    "the adapter is for a model with another vocabulary"
                )


def _changeable(pieces: Iterable[Piece], spec: ModelSpec) -> Iterator[Linear]:
    """Layers to whose products adapters can be added: not those that are computed in a way of their own. The embedding
    is one, and another one where it is the head, too."""
    for piece in pieces:
        linears = [piece] if isinstance(piece, Linear) else []
        if isinstance(piece, Table):
            linears = [lookup_of(spec), head_of(spec)] if spec.tie_word_embeddings else [lookup_of(spec)]
        for each in linears:
            if each.experts is None and not (each.key_rows or each.is_exact or each.has_unit_rows):
                yield each
