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
from allspan.worker.adapters.staged import StagedAdapter, checksum_of
from allspan.worker.models.holding import Holding
from allspan.worker.models.layout import expected_shapes, layout
from allspan.worker.models.pieces import Linear, Piece
from allspan.worker.models.source import PieceSource
from allspan.worker.program.program import ProgramBuilder, Rows, Slot
from allspan.worker.step.backend import HOST
from allspan.worker.weights.held_tensor import HeldTensor

_NAMING = "hugging_face"
_GIVEN_UP = StagedAdapter({}, "")
_FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer that adapters may change, as this rank holds it."""

    piece: Linear
    parts: tuple[int, ...]
    """The outputs of each part."""
    a: PackedSpec
    """One part, of `rank` features for each part of the layer."""
    b: HeldTensor
    """The panels of one adapter's second matrix."""

    def tensors(self, slots: int) -> dict[str, HeldTensor]:
        """The first matrices of all adapters, and what `AdapterWeights` has."""
        held = {
            "a": HeldTensor((slots, *self.a.shape), torch.uint8),
            "b": HeldTensor((slots, *self.b.shape), self.b.dtype),
            "ranks": HeldTensor((slots, len(self.parts)), torch.int32),
            "ends": HeldTensor((len(self.parts),), torch.int32),
        }
        return {f"{self.piece.name}.adapter_{name}": tensor for name, tensor in held.items()}


class AdapterSlots:
    """A LinearDelta (`allspan.worker.quant.base`): `count` slots for adapters of ranks up to `rank`. First matrices of
    lower ranks are filled up with zeros.

    Ranks hold what goes with their part of the layer: all of a where the layer's outputs are split and their rows of
    b, or their columns of a and all of b where its inputs are. So the sums over ranks that layers have anyway are all
    that adapters need.
    """

    def __init__(self, holding: Holding, count: int, rank: int, packer: Packer | None = None) -> None:
        """`packer`: packs while steps run; None: the one of the weights, which must not."""
        self._holding = replace(holding, delta=None, packer=packer or holding.packer)
        self._rank, self.num_slots = rank, count
        self._layers = {piece.name: self._layer(piece) for piece in _changeable(holding.pieces)}
        self.tensors: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots on this rank."""
        held = (tensor for layer in self._layers.values() for tensor in layer.tensors(self.num_slots).values())
        return sum(tensor.num_bytes for tensor in held)

    @property
    def writes_beside_steps(self) -> bool:
        """See `SlotStore`: steps on the CPU read no slot but those of their rows."""
        return all(tensor.device.type == HOST for tensor in self.tensors.values())

    def allocate(self, device: str) -> None:
        """Makes the tensors, of adapters that change nothing."""
        self.tensors = {
            name: torch.zeros(held.shape, dtype=held.dtype, device=device)
            for layer in self._layers.values()
            for name, held in layer.tensors(self.num_slots).items()
        }
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
        self, path: Path, goes_on: Callable[[], bool] = lambda: True, opener: Opener = open_regular
    ) -> StagedAdapter:
        """Reads a folder of PEFT's into host memory, for `write` to put it into a slot; one without tensors where
        `goes_on` said no. Raises CheckpointError as `check` does, and for numbers that are not finite."""
        folder = self.check(path, opener)
        found: dict[str, LowRank] = {}
        for module in folder.modules:
            if not goes_on():
                return _GIVEN_UP
            found[module] = folder.matrices(module, self._holding.dtype)
        staged: dict[str, Tensor] = {}
        for layer in self._layers.values():
            if not goes_on():
                return _GIVEN_UP
            staged |= self._staged(layer, folder, found)
        if not self.writes_beside_steps:  # `write` waits for no copy to a GPU
            staged = {name: tensor.pin_memory() for name, tensor in staged.items()}
        return StagedAdapter(staged, checksum_of(found))

    def write(self, slot: int, staged: StagedAdapter) -> None:
        """Puts an adapter into a slot that no step which may still run reads; on a GPU behind the steps that are queued
        and before those to come."""
        for name, tensor in staged.tensors.items():
            self.tensors[name][slot].copy_(tensor, non_blocking=True)

    def load(self, slot: int, path: Path) -> None:
        """Reads a folder of PEFT's into a slot. Raises as `stage` does; then the slot is as before."""
        self.write(slot, self.stage(path))

    def has(self, layer: str) -> bool:
        return layer in self._layers

    def shrink(self, program: ProgramBuilder, layer: str, x: Slot) -> Slot:
        held, rows = self._layers[layer], program.rows(x)
        features = held.a.features
        low = program.buffer(f"adapter like {rows.value} {features}", rows, features, is_exact=True)
        a, slots = program.named(next(iter(held.tensors(self.num_slots)))), program.view(low, 1, features)
        program.op("expert_linear", x, a, None, held.a, 0, self._routing(program, rows), slots)
        return low

    def expand(self, program: ProgramBuilder, layer: str, low: Slot, product: Slot) -> None:
        _, *names = self._layers[layer].tensors(self.num_slots)
        weights = AdapterWeights(*(program.named(name) for name in names))
        program.op("add_adapters", low, weights, self._routing(program, program.rows(low)), product)

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
        of_logits = rows is Rows.LOGITS
        tokens = program.input("logits_rows", Rows.LOGITS) if of_logits else None
        program.op("route_adapters", program.input("adapters"), tokens, routing)
        return routing

    def _layer(self, piece: Linear) -> _Layer:
        shape, kind = self._holding.shape_of(piece), _FORMATS[self._holding.dtype]
        outputs = len(shape.parts) * self._rank
        a = PackedSpec(kind, kind, (outputs,), len(shape.inputs), memory=shape.memory)
        b = HeldTensor((panels_of(shape.parts), self._rank, COLUMNS), self._holding.dtype)
        return _Layer(piece, shape.parts, a, b)

    def _staged(self, layer: _Layer, folder: PeftFolder, found: Mapping[str, LowRank]) -> dict[str, Tensor]:
        """What a slot of the layer is to hold, by the names of its tensors."""
        holding, piece = self._holding, layer.piece
        name_a, name_b, name_ranks, _ = layer.tensors(self.num_slots)
        ranks = torch.zeros(len(layer.parts), dtype=torch.int32)
        packed = torch.empty(layer.a.shape, dtype=torch.uint8)
        panels = torch.zeros(layer.b.shape, dtype=layer.b.dtype)
        inputs = holding.shard.part(piece.inputs)
        a = torch.zeros(layer.a.features, len(inputs), dtype=holding.dtype)
        for number, part in enumerate(piece.parts):
            if (matrices := found.get(self._module(part.name))) is not None:
                first = number * self._rank
                a[first : first + matrices.rank] = matrices.a[:, inputs.start : inputs.stop]
                ranks[number] = matrices.rank
        holding.packer.floats(a, Target(layer.a, 0, 0, packed))
        source = PieceSource(holding.shard, holding.weights, OutputRows(folder, found), piece)
        for number, outputs in enumerate(layer.parts):
            rows = torch.zeros(outputs, self._rank, dtype=holding.dtype)
            source.floats(number, range(outputs), range(self._rank), rows)
            put_rows(rows, layer.parts, number, panels)
        return {name_a: packed, name_b: panels, name_ranks: ranks}

    def _module(self, part: str) -> str:
        """The name of the module of Hugging Face's model that has a part's weight."""
        return self._holding.weights.foreign(f"{part}.weight", _NAMING).removesuffix(".weight")

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Outputs and inputs of the modules that may be changed, of the whole model."""
        spec, weights = self._holding.spec, self._holding.weights
        names = {self._module(part.name) for piece in _changeable(layout(spec)) for part in piece.parts}
        shapes = expected_shapes(spec, weights, _NAMING)
        return {name: shapes[f"{name}.weight"] for name in names}

    def _check(self, folder: PeftFolder) -> None:
        if folder.rank > self._rank:
            raise AdapterRank(
                f"{folder.path}: the adapter has rank {folder.rank}, max_lora_rank is {self._rank}: raise it"
            )
        for module in folder.modules:
            if module not in self._shapes:
                raise CheckpointError(
                    f"{folder.path}: {module!r} is no layer of this model that an adapter may change: those are linear "
                    "layers of attention and MLP and a head of its own, not embeddings, heads that are tied to them, "
                    "routers and experts"
                )
            if (actual := folder.shape(module)) != self._shapes[module]:
                raise CheckpointError(
                    f"{folder.path}: the adapter of {module!r} is for a weight of shape {list(actual)}, the model's "
                    f"has {list(self._shapes[module])}"
                )


def _changeable(pieces: Iterable[Piece]) -> Iterator[Linear]:
    """Layers to whose products adapters can be added: not those that are computed in a way of their own."""
    for piece in pieces:
        if not isinstance(piece, Linear) or piece.experts is not None:
            continue
        if not (piece.key_rows or piece.is_exact or piece.has_unit_rows):
            yield piece
