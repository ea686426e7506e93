"""Program: a forward pass as data. It is built once and run for every batch; Python interprets it here.

A slot is a tensor that ops name: a buffer (allocated once, cut to the step's rows), a weight, an input of the step, or
a layer of the cache. An op is a name from `allspan.kernels.ops.OpSet` or the collectives, and its arguments in order.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from allspan.kernels.ops import OpSet
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.router_spec import RouterSpec
from allspan.protos.api.engine import OpProfile
from allspan.protos.api.errors import InternalError
from allspan.worker.parallel.base import Collectives
from allspan.worker.program.profile import OpTimer, profiles

_OPS_A_BEAT = 16

_Made = TypeVar("_Made")

COLLECTIVE_OPS = frozenset({"all_reduce", "all_reduce_add_rms_norm", "all_gather_columns"})
"""The last two are those of GPUs alone: see `allspan.worker.backend.cuda.collectives`."""


class Rows(enum.Enum):
    """How many rows of a buffer a step uses: one a new token, one a new token whose attention this rank computes, one a
    row of logits, or one alone."""

    TOKENS = "tokens"
    OWN = "own tokens"
    LOGITS = "logits"
    ONE = "one"


@dataclass(frozen=True, slots=True)
class Slot:
    """`index` into the program's slots."""

    index: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """[rows, *shape], in the model's dtype for activations, float32 where it `is_exact`, or int32 where it
    `is_integer`. Buffers of one `storage` are the same memory in different shapes, or some columns of it."""

    name: str
    rows: Rows
    shape: tuple[int, ...]
    storage: str
    is_exact: bool = False
    is_integer: bool = False
    first: int = 0
    """Its first element among those of a row of its storage."""

    def within(self, storage: Tensor) -> Tensor:
        """Returns the buffer as a view of its storage [rows, ..]; rows of some columns lie apart."""
        own = storage.flatten(1)[:, self.first : self.first + math.prod(self.shape)]
        return own.view(len(storage), *self.shape)

    def dtype(self, activations: torch.dtype) -> torch.dtype:
        """Its elements' type where activations have this one."""
        return torch.int32 if self.is_integer else torch.float32 if self.is_exact else activations


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor (or, for attention, its metadata) that is bound under this name."""

    name: str
    input_rows: Rows | None = None
    """An input of every step, and what its rows count; None: it stays where it is bound."""


Value = Slot | PackedSpec | RouterSpec | float | int | str | None
Argument = Value | tuple[Value, ...]


def flat(arguments: Iterable[Argument]) -> Iterator[Value]:
    """Arguments, those in tuples one by one."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from argument
        else:
            yield argument


@dataclass(frozen=True, slots=True)
class Op:
    """It is left out of a step that has no `rows`."""

    name: str
    arguments: tuple[Argument, ...]
    rows: Rows


@dataclass(frozen=True, slots=True)
class Program:
    slots: tuple[Buffer | Named, ...]
    ops: tuple[Op, ...]
    output: Slot


def function_of(op: Op, ops: OpSet, collectives: Collectives) -> Callable[..., None]:
    """What runs an op of a program."""
    return collectives.program_ops[op.name] if op.name in COLLECTIVE_OPS else ops.op(op.name)


def buffer_bytes(program: Program, capacity: Mapping[Rows, int], dtype: torch.dtype) -> int:
    """Returns the bytes of an Interpreter's buffers for `capacity` rows, with activations in this dtype."""
    return sum(math.prod(shape) * held.itemsize for shape, held in _storages(program, capacity, dtype).values())


def _storages(
    program: Program, capacity: Mapping[Rows, int], dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for slot in program.slots:
        if isinstance(slot, Buffer):
            rows = 1 if slot.rows is Rows.ONE else capacity[slot.rows]
            found.setdefault(slot.storage, ((rows, *slot.shape), slot.dtype(dtype)))
    return found


class ProgramBuilder:
    """Collects slots and ops; the same name is the same slot."""

    def __init__(self) -> None:
        self._slots: list[Buffer | Named] = []
        self._by_name: dict[str, Slot] = {}
        self._ops: list[Op] = []
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Returns what `make` returned when this was first called with the key: for ops whose results others share."""
        if key not in self._made:
            self._made[key] = make()
        found: _Made = self._made[key]
        return found

    def buffer(self, name: str, rows: Rows, *shape: int, is_exact: bool = False, is_integer: bool = False) -> Slot:
        return self._add(Buffer(name, rows, shape, name, is_exact, is_integer))

    def view(self, slot: Slot, *shape: int) -> Slot:
        """The buffer `slot` with rows of another shape."""
        buffer = self._buffer(slot)
        if math.prod(shape) != math.prod(buffer.shape):
            raise InternalError(f"slot {buffer.name!r} of shape {buffer.shape} has no view of shape {shape}")
        name = f"{buffer.name} as {' x '.join(map(str, shape))}"
        return self._add(replace(buffer, name=name, shape=shape))

    def columns(self, slot: Slot, first: int, *shape: int) -> Slot:
        """Columns of the buffer `slot` from the `first` on, in rows of this shape, which lie apart: for ops that say
        that they take such."""
        buffer, width = self._buffer(slot), math.prod(shape)
        if first + width > math.prod(buffer.shape):
            raise InternalError(
                f"slot {buffer.name!r} of shape {buffer.shape} has no columns {first} to {first + width}"
            )
        name = f"{buffer.name} from {first} as {' x '.join(map(str, shape))}"
        return self._add(replace(buffer, name=name, shape=shape, first=buffer.first + first))

    def width(self, slot: Slot) -> int:
        """Elements in a row of a buffer."""
        return math.prod(self._buffer(slot).shape)

    def rows(self, slot: Slot) -> Rows:
        """What the rows of a buffer count."""
        return self._buffer(slot).rows

    def scratch(self, label: str, like: Slot, width: int = 0) -> Slot:
        """A buffer in the shape of another, or with rows of `width`, for what an op needs only until the next one: same
        label, same memory."""
        buffer = self._buffer(like)
        shape = (width,) if width else buffer.shape
        return self.buffer(f"{label} like {buffer.rows.value} {shape}", buffer.rows, *shape)

    def named(self, name: str) -> Slot:
        """A weight, a constant or a cache tensor."""
        return self._add(Named(name))

    def input(self, name: str, rows: Rows = Rows.TOKENS) -> Slot:
        """A tensor or metadata of the step."""
        return self._add(Named(name, rows))

    def op(self, name: str, *arguments: Argument) -> None:
        """Its rows are those of logits where it has any, else those of its last buffer, which it writes."""
        used = [self._slots[value.index] for value in flat(arguments) if isinstance(value, Slot)]
        kinds = [slot.rows for slot in used if isinstance(slot, Buffer) and slot.rows is not Rows.ONE]
        rows = kinds[-1] if kinds else Rows.TOKENS
        self._ops.append(Op(name, arguments, Rows.LOGITS if Rows.LOGITS in kinds else rows))

    def build(self, output: Slot) -> Program:
        return Program(tuple(self._slots), tuple(self._ops), output)

    def _buffer(self, slot: Slot) -> Buffer:
        buffer = self._slots[slot.index]
        if not isinstance(buffer, Buffer):
            raise InternalError(f"slot {buffer.name!r} is no buffer")
        return buffer

    def _add(self, slot: Buffer | Named) -> Slot:
        known = self._by_name.get(slot.name)
        if known is None:
            known = self._by_name[slot.name] = Slot(len(self._slots))
            self._slots.append(slot)
        elif self._slots[known.index] != slot:
            raise InternalError(f"slot {slot.name!r} is declared twice: {self._slots[known.index]} and {slot}")
        return known


class Interpreter:
    """Runs a program op by op. Buffers are allocated here, for `max_tokens` and `max_requests` rows."""

    def __init__(
        self,
        program: Program,
        ops: OpSet,
        collectives: Collectives,
        capacity: Mapping[Rows, int],
        device: str,
        activations: torch.dtype = torch.float32,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """`synchronize` waits for the device, when ops are timed; None: an op is done when it returns."""
        self._program = program
        self._ops = ops
        self._capacity = {Rows.OWN: 0, **capacity, Rows.ONE: 1}
        self._synchronize = synchronize
        self._timer = OpTimer(synchronize)
        self._is_profiling = False
        self.progress = 0
        """Counts up within a run, so that a long step differs from one that hangs."""
        self._table: list[Any] = [None] * len(program.slots)
        self._names = {slot.name: i for i, slot in enumerate(program.slots) if isinstance(slot, Named)}
        self._buffers: list[tuple[int, Rows, Tensor]] = []
        storages = {
            name: torch.zeros(shape, dtype=held, device=device)
            for name, (shape, held) in _storages(program, self._capacity, activations).items()
        }
        for i, slot in enumerate(program.slots):
            if isinstance(slot, Buffer):
                self._buffers.append((i, slot.rows, slot.within(storages[slot.storage])))
        self._calls: list[tuple[Callable[..., None], tuple[Argument, ...], Rows]] = [
            (function_of(op, ops, collectives), op.arguments, op.rows) for op in program.ops
        ]

    @property
    def buffers(self) -> list[Tensor]:
        """Some are the same memory in different shapes."""
        return [buffer for _, _, buffer in self._buffers]

    def bind(self, values: Mapping[str, Any]) -> None:
        """Sets named slots; a name that the program does not use is passed over."""
        for name, value in values.items():
            index = self._names.get(name)
            if index is not None:
                self._table[index] = value

    def run(self, inputs: Mapping[str, Any], num_tokens: int, num_logits: int, num_own: int = 0) -> Tensor:
        """The output's rows of this step, a view that the next run overwrites."""
        counts = {Rows.TOKENS: num_tokens, Rows.OWN: num_own, Rows.LOGITS: num_logits, Rows.ONE: 1}
        for rows, count in counts.items():
            if count > self._capacity[rows]:
                raise InternalError(f"a step of {count} rows of {rows.value}, the buffers hold {self._capacity[rows]}")
        self.bind(inputs)
        table = self._table
        for index, rows, buffer in self._buffers:
            table[index] = buffer[: counts[rows]]
        if num_tokens and self._is_profiling:
            self._run_timed(counts)
        elif num_tokens:
            for first in range(0, len(self._calls), _OPS_A_BEAT):
                self.progress += 1
                for function, arguments, rows in self._calls[first : first + _OPS_A_BEAT]:
                    if counts[rows]:
                        function(*self._values(arguments))
        output: Tensor = table[self._program.output.index]
        return output

    def rows(self, slot: Slot) -> Tensor:
        """A buffer at its full capacity, as the last run left it."""
        return next(buffer for index, _, buffer in self._buffers if index == slot.index)

    def start_profile(self) -> None:
        """Times every op of the coming runs, from zero."""
        self._timer = OpTimer(self._synchronize)
        self._is_profiling = True

    def stop_profile(self) -> None:
        """What was measured stays readable."""
        self._is_profiling = False

    def profile(self) -> tuple[OpProfile, ...]:
        """What each op took since `start_profile`, the longest in total first; empty before any."""
        return profiles(self._timer.rows())

    def _values(self, arguments: tuple[Argument, ...]) -> list[Any]:
        table = self._table
        values: list[Any] = []
        for argument in arguments:
            if type(argument) is Slot:
                values.append(table[argument.index])
            elif isinstance(argument, tuple):  # of the same type: ops take named ones
                filled = [table[a.index] if type(a) is Slot else a for a in argument]
                values.append(tuple.__new__(type(argument), filled))
            else:
                values.append(argument)
        return values

    def _run_timed(self, counts: Mapping[Rows, int]) -> None:
        timer = self._timer
        for op, (function, arguments, rows) in zip(self._program.ops, self._calls, strict=True):
            if counts[rows]:
                values = self._values(arguments)
                timer.call(f"{op.name} {self._ops.kernel_name(op.name, values)}", function, *values)
