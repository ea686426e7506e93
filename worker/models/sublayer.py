"""Sublayer: what a block writes its ops with, from the normed residual stream and back to it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from allspan.kernels.ops import Rotation
from allspan.protos.api.errors import ConfigError
from allspan.worker.models.holding import Holding
from allspan.worker.models.pieces import Linear, Piece
from allspan.worker.models.placement import Placement
from allspan.worker.models.shard import Shard
from allspan.worker.models.spec import Norms, NormSpec
from allspan.worker.models.step_meta import MakeMeta
from allspan.worker.program.program import ProgramBuilder, Rows, Slot
from allspan.worker.quant.base import Epilogue
from allspan.worker.quant.experts import ExpertProducts
from allspan.worker.step.inputs import axis_name, group_name
from allspan.worker.step.row_inputs import POSITION_AXES

MakeConstant = Callable[[int], Tensor]
"""From the most positions of a request to a tensor."""
Derive = Callable[[Mapping[str, Tensor]], Tensor]
"""From the weights and constants, by name, to what follows from them; called again when weights have changed."""


@dataclass(slots=True)
class Bindings:
    """What a program's named slots are to be bound to beside weights, caches and the step's own inputs."""

    constants: dict[str, MakeConstant] = field(default_factory=dict)
    derived: dict[str, Derive] = field(default_factory=dict)
    metas: dict[str, tuple[int, MakeMeta]] = field(default_factory=dict)
    """With the cache group whose pages it is of."""
    names: dict[tuple[str, Hashable], str] = field(default_factory=dict)
    """The names given so far, by label and key."""
    num_positions: int = 1
    """Positions that a token has."""
    prompt_lengths: Callable[[int], tuple[int, ...]] = lambda max_positions: ()
    """See `RowInputs.prompt_lengths`."""

    def name(self, label: str, key: Hashable) -> str:
        """The label for its first key, and with a number for others: "cos_sin", "cos_sin.1"."""
        count = sum(known == label for known, _ in self.names)
        return self.names.setdefault((label, key), f"{label}.{count}" if count else label)


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream, and what is normed of it or added to it next, for one kind of rows."""

    rows: Rows
    residual: Slot
    x: Slot


class Sublayer:
    """An attention or MLP block of one layer. `program` takes ops beside those that it appends itself."""

    def __init__(
        self,
        builder: StreamBuilder,
        number: int,
        group: int,
        norms: tuple[tuple[str, str], Norms],
        pieces: tuple[Piece, ...],
        stream: Stream,
    ) -> None:
        """`number` is the layer's, `group` that of its cache; `norms` have names, of that before and that after."""
        self.program, self.holding = builder.program, builder.holding
        self.quantised_cache = builder.quantised_cache
        self._builder = builder
        self._number, self._group = number, group
        self._prefix = f"layers.{number}."
        self._norm_names, self._norms = norms
        self._pieces = {piece.name.removeprefix(self._prefix): piece for piece in pieces}
        self.stream = stream

    @property
    def shard(self) -> Shard:
        return self.holding.shard

    @property
    def slots(self) -> Slot:
        """int32 [rows of attention]: where each token's keys and values go in the pages of the layer's cache group."""
        return self.program.input(group_name("slots", self._group), self._builder.attention_rows)

    @property
    def row_numbers(self) -> Slot:
        """int32 [rows of the stream]: negative where a row is padding."""
        if self.stream.rows is Rows.LOGITS:
            return self.program.input("logits_rows", Rows.LOGITS)
        has_slots = self._builder.attention_rows is Rows.TOKENS
        return self.slots if has_slots else self.program.input("ids")  # padding has none where ranks attend apart

    def piece(self, name: str) -> Linear:
        """A linear layer of the block."""
        piece = self._pieces[name]
        assert isinstance(piece, Linear), name
        return piece

    def weight(self, name: str) -> Slot:
        """A tensor that the rank holds of the block."""
        return self.program.named(self._prefix + name)

    def cache(self, part: str) -> Slot:
        """The layer's "k_cache", "v_cache", "k_scales" or "v_scales"."""
        return self.program.named(f"{part}.{self._number}")

    def buffer(self, name: str, width: int, is_exact: bool = False, is_integer: bool = False) -> Slot:
        """[rows of the stream, width], of activations, float32 or int32; blocks of other layers that ask for the same
        get the same memory."""
        return self._builder.buffer(name, self.stream.rows, width, is_exact, is_integer)

    def single(self, name: str, width: int) -> Slot:
        """int32 [1, width], shared as `buffer` is."""
        return self._builder.buffer(name, Rows.ONE, width, is_integer=True)

    def constant_name(self, label: str, key: Hashable) -> str:
        return self._builder.bindings.name(label, key)

    def constant(self, label: str, key: Hashable, make: MakeConstant) -> Slot:
        """A tensor that is made once for all blocks that ask for it with this key."""
        name = self.constant_name(label, key)
        self._builder.bindings.constants.setdefault(name, make)
        return self.program.named(name)

    def state(self, label: str, make: Callable[[], Tensor]) -> Slot:
        """A tensor of this layer alone, which stays from step to step and may change."""
        name = f"{label}.{self._number}"
        self._builder.bindings.constants[name] = lambda _: make()
        return self.program.named(name)

    def placement(self, num_experts: int) -> Placement:
        """Which groups of ranks hold which of the layer's experts."""
        return self.holding.placement(self._number, num_experts)

    def derived(self, label: str, make: Derive) -> Slot:
        """A tensor of this layer that follows from its weights."""
        name = f"{label}.{self._number}"
        self._builder.bindings.derived[name] = make
        return self.program.named(name)

    def rotation(self, tables: tuple[Slot, ...], width: int, q_scales: Slot | None = None) -> Rotation[Slot]:
        """The cosines and sines of each token, from a table for each of its positions; `width` of a table's rows.
        `q_scales`: what queries are multiplied with, by position."""
        rotation = self._builder.rotation(tables, width)
        if q_scales is not None and len(tables) > 1:
            raise ConfigError("query_scale: not for a model whose tokens have several positions")
        return rotation._replace(q_scales=q_scales)

    def choose_tables(self, prompt_lengths: Callable[[int], tuple[int, ...]]) -> None:
        """Has the rotary tables chosen by the length of prompts: from the most positions of a request to
        `RowInputs.prompt_lengths`, which are the same for all layers."""
        self._builder.bindings.prompt_lengths = prompt_lengths

    def meta(self, label: str, key: Hashable, make: MakeMeta) -> Slot:
        """Metadata of the step, for all blocks of the cache group that ask for it with this key."""
        name = self._builder.bindings.name(label, (self._group, key))
        self._builder.bindings.metas.setdefault(name, (self._group, make))
        return self.program.input(name, self._builder.attention_rows)

    def linear(self, name: str, x: Slot, out: Slot, epilogue: Epilogue = Epilogue.STORE) -> None:
        """Appends the product of x and a linear layer of the block."""
        self.holding.emit(self.program, self.piece(name), x, out, epilogue)

    def add_linear(self, name: str, x: Slot) -> None:
        """Appends the product of x and the block's last linear layer, and its way to the residual stream. Where nothing
        lies between, the product is added at once."""
        sums_ranks = self.piece(name).sums_ranks
        if (out := self.target(sums_ranks)) == self.stream.residual:
            self.linear(name, x, out, Epilogue.ADD)
        else:
            self.linear(name, x, out)
            self.add(sums_ranks)

    def experts(self, name: str) -> ExpertProducts:
        """What appends the products of a layer that every expert of the block has."""
        return self.holding.experts(self.program, self.piece(name))

    def target(self, sums_ranks: bool) -> Slot:
        """The residual stream, where a block's product may be added to it at once; else `output`."""
        is_direct = self._norms.after is None and not self._sums(sums_ranks)
        return self.stream.residual if is_direct else self.output

    @property
    def output(self) -> Slot:
        """Where a block without a last linear layer writes what `add` adds; what it read may lie there."""
        return self.stream.x

    def add(self, sums_ranks: bool) -> None:
        """Has `output` normed and added to the residual stream, its sum over the ranks if each has a part of it."""
        if self._sums(sums_ranks):
            self.program.op("all_reduce", self.stream.x)
        if (norm := self._norms.after) is not None:
            self._builder.norm(self.stream.x, f"{self._prefix}{self._norm_names[1]}.weight", norm, self.stream.x)
        self._builder.is_pending = True

    def normed(self) -> Slot:
        """What the block reads: the residual stream, with what the last sublayer added, normed."""
        if (norm := self._norms.before) is None:
            self._builder.flush(self.stream)
            return self.stream.residual
        self._builder.norm_stream(self.stream, f"{self._prefix}{self._norm_names[0]}.weight", norm)
        return self.stream.x

    def _sums(self, sums_ranks: bool) -> bool:
        return sums_ranks and self.shard.size > 1


class StreamBuilder:
    """What the sublayers of a model share while its program is built."""

    def __init__(self, holding: Holding, quantised_cache: bool) -> None:
        self.holding = holding
        self.quantised_cache = quantised_cache
        self.program = ProgramBuilder()
        self.bindings = Bindings()
        self.attention_rows = Rows.OWN if holding.shard.attends_apart else Rows.TOKENS
        """The rows of attention blocks, and of the inputs of a step that they read."""
        self.is_pending = False
        """Whether `x` is still to be added to the residual stream: the next norm does both."""
        self._widths: dict[str, int] = {}
        self._rotations: dict[tuple[Slot, ...], Rotation[Slot]] = {}

    def buffer(self, name: str, rows: Rows, width: int, is_exact: bool = False, is_integer: bool = False) -> Slot:
        prefix = {Rows.LOGITS: "last.", Rows.OWN: "own."}.get(rows, "")
        if self._widths.setdefault(prefix + name, width) != width:
            name = f"{name} {width}"
        return self.program.buffer(prefix + name, rows, width, is_exact=is_exact, is_integer=is_integer)

    def stream(self, rows: Rows) -> Stream:
        width = self.holding.spec.hidden_size
        return Stream(rows, self.buffer("residual", rows, width, is_exact=True), self.buffer("x", rows, width))

    def rotation(self, tables: tuple[Slot, ...], width: int) -> Rotation[Slot]:
        """See `Sublayer.rotation`. Rows of several tables are added up once a step for all blocks: then the rotation is
        a table with a row for each token of the step, and its positions are the rows' numbers."""
        rows = self.attention_rows
        if len(tables) == 1:
            return Rotation(self.program.input("positions", rows), tables[0])
        if tables not in self._rotations:
            program, number = self.program, len(self._rotations)
            total, part = (
                program.buffer(f"{name}.{number}", rows, width, is_exact=True)
                for name in ("cos_sin_rows", "cos_sin_part")
            )
            first, *others = zip(map(axis_name, POSITION_AXES), tables, strict=True)
            program.op("gather_rows", first[1], program.input(first[0], rows), total)
            for name, table in others:
                program.op("gather_rows", table, program.input(name, rows), part)
                program.op("add", part, total)
            self.bindings.num_positions = len(tables)
            self._rotations[tables] = Rotation(program.input("row_numbers", rows), total)
        return self._rotations[tables]

    def norm(self, x: Slot, name: str, norm: NormSpec, out: Slot) -> None:
        op = "layer_norm" if norm.kind == "layer" else "rms_norm"
        self.program.op(op, x, self.program.named(name), norm.eps, out)

    def norm_stream(self, stream: Stream, name: str, norm: NormSpec) -> None:
        """x = the norm of the residual stream, to which x may first be added."""
        if self.is_pending and norm.kind == "rms":
            weight = self.program.named(name)
            self.program.op("add_rms_norm", stream.x, stream.residual, weight, norm.eps, stream.x)
            self.is_pending = False
        else:
            self.flush(stream)
            self.norm(stream.residual, name, norm, stream.x)

    def flush(self, stream: Stream) -> None:
        """Adds what is still to be added to the residual stream."""
        if self.is_pending:
            self.program.op("add", stream.x, stream.residual)
            self.is_pending = False
