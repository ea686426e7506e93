"""A program that the CPU kernels run themselves: one native call a step, with no Python between ops.

Ops that the kernels do not have (an all-reduce over MPI, say) are called from here, between two stretches of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.ops import OpSet
from allspan.protos.api.engine import OpProfile
from allspan.protos.api.errors import DeadlineExceeded, InternalError
from allspan.worker.parallel.base import Collectives
from allspan.worker.program.profile import OpTimer, profiles
from allspan.worker.program.program import (
    COLLECTIVE_OPS,
    Argument,
    Buffer,
    Named,
    Op,
    Program,
    Rows,
    Slot,
    flat,
    function_of,
)

_KINDS = (Rows.TOKENS, Rows.OWN, Rows.LOGITS)
"""The kinds of rows as the native program numbers them."""


class NativeProgram:
    """Runs a program as `allspan.worker.program.program.Interpreter` does, on the threads of a CPU op set."""

    def __init__(self, program: Program, ops: OpSet, collectives: Collectives, capacity: Mapping[Rows, int]) -> None:
        native: Any = ops.program
        window = collectives.capabilities.window
        self._program = program
        self._capacity = {Rows.OWN: 0, **capacity, Rows.ONE: 1}
        self._native = native(len(program.slots), window)
        self._names: dict[str, int] = {}
        self._bound: dict[int, Any] = {}
        self._buffers: dict[int, tuple[Rows, Tensor]] = {}
        storages: dict[str, Tensor] = {}
        foreign = ops.reference_ops | (COLLECTIVE_OPS if window is None and collectives.size > 1 else frozenset())
        used = {slot.index for op in program.ops if op.name not in foreign for slot in slots_of(op)}
        for i, slot in enumerate(program.slots):
            if isinstance(slot, Buffer):
                shape = (self._capacity[slot.rows], *slot.shape)
                if slot.storage not in storages:
                    storages[slot.storage] = torch.zeros(shape, dtype=slot.dtype(torch.float32))
                self._buffers[i] = slot.rows, slot.within(storages[slot.storage])
                self._native.bind(i, self._buffers[i][1])
            else:
                self._names[slot.name] = i
                if slot.input_rows is not None and i in used:
                    self._native.declare_input(i, slot.name, _KINDS.index(slot.input_rows))
        self._stretches: list[_Stretch] = []
        self._needed: list[_Stretch] = []
        """The stretches that the last step needed."""
        self._timer = OpTimer()
        self._is_profiling = False
        self._foreign_progress = 0
        self._step: tuple[Mapping[str, Any] | None, Mapping[Rows, int]] = None, {}
        """The inputs that the native program has taken in, and the step's rows by kind."""
        self._output = self._buffers[program.output.index][1]
        """The output of a step with these inputs."""
        first = 0
        for is_foreign, stretch in itertools.groupby(program.ops, lambda op: op.name in foreign):
            ops_here = list(stretch)
            if is_foreign:
                self._stretches += [self._foreign(op, function_of(op, ops, collectives)) for op in ops_here]
                continue
            for op in ops_here:
                arguments = [(type(a) is Slot, a.index if type(a) is Slot else a) for a in flat(op.arguments)]
                self._native.add(op.name, arguments, _KINDS.index(op.rows))
            self._stretches.append((first, first + len(ops_here)))
            first += len(ops_here)
        self._optional = [each for each in self._stretches if isinstance(each, _Foreign) and each.inputs]
        self._plain = _joined(each for each in self._stretches if each not in self._optional)
        """The stretches of a step that has none of the optional inputs."""

    @property
    def buffers(self) -> list[Tensor]:
        """None: what native code has recorded of them must stay true."""
        return []

    @property
    def progress(self) -> int:
        """Counts up within a run, so that a long step differs from one that hangs."""
        return int(self._native.progress) + self._foreign_progress

    def bind(self, values: Mapping[str, Any]) -> None:
        """Sets named slots; a name that the program does not use is passed over. Tensors stay where they are."""
        for name, value in values.items():
            index = self._names.get(name)
            if index is not None:
                self._bound[index] = value
                self._native.bind(index, value)

    def run(self, inputs: Mapping[str, Any], num_tokens: int, num_logits: int, num_own: int = 0) -> Tensor:
        """The output's rows of this step, a view that the next run overwrites. The very mapping of the run before says
        that its tensors are the same ones, with other numbers in them."""
        if inputs is self._step[0]:
            self._native.again()
        else:
            self._take(inputs, {Rows.TOKENS: num_tokens, Rows.OWN: num_own, Rows.LOGITS: num_logits, Rows.ONE: 1})
        if num_tokens:
            try:
                for stretch in self._needed:
                    if isinstance(stretch, _Foreign):
                        self._call(stretch)
                    else:
                        self._native.run(*stretch)
            except TimeoutError as error:
                raise DeadlineExceeded(str(error)) from None
        return self._output

    def rows(self, slot: Slot) -> Tensor:
        """A buffer at its full capacity, as the last run left it."""
        return self._buffers[slot.index][1]

    def start_profile(self) -> None:
        """Times every op of the coming runs, from zero."""
        self._timer = OpTimer()
        self._is_profiling = True
        self._native.start_profile()

    def stop_profile(self) -> None:
        """What was measured stays readable."""
        self._is_profiling = False
        self._native.stop_profile()

    def profile(self) -> tuple[OpProfile, ...]:
        """What each op took since `start_profile`, the longest in total first; empty before any."""
        return profiles([*self._native.profile(), *self._timer.rows()])

    def _take(self, inputs: Mapping[str, Any], counts: dict[Rows, int]) -> None:
        for rows, count in counts.items():
            if count > self._capacity[rows]:
                raise InternalError(f"a step of {count} rows of {rows.value}, the buffers hold {self._capacity[rows]}")
        self._step = None, counts
        rows, output = self._buffers[self._program.output.index]
        self._output = output[: counts[rows]]
        if counts[Rows.TOKENS]:
            self._native.begin(inputs, [counts[kind] for kind in _KINDS])
            self._step = inputs, counts
            self._needed = self._plain
            if any(each.is_needed(inputs) for each in self._optional):
                self._needed = [each for each in self._stretches if isinstance(each, tuple) or each.is_needed(inputs)]

    def _call(self, foreign: _Foreign) -> None:
        op = foreign.op
        inputs, counts = self._step
        if counts[op.rows] == 0:
            return
        given = inputs or {}

        def value(argument: Argument) -> Any:
            if isinstance(argument, tuple):  # of the same type: ops take named ones
                return tuple.__new__(type(argument), map(value, argument))
            return self._value(argument, foreign, given) if isinstance(argument, Slot) else argument

        values = [value(argument) for argument in op.arguments]
        if self._is_profiling:
            self._timer.call(op.name, foreign.function, *values)
        else:
            foreign.function(*values)
        self._foreign_progress += 1

    def _foreign(self, op: Op, function: Callable[..., None]) -> _Foreign:
        named = ((slot.index, self._program.slots[slot.index]) for slot in slots_of(op))
        inputs = {i: slot.name for i, slot in named if isinstance(slot, Named) and slot.input_rows is not None}
        return _Foreign(op, function, inputs)

    def _value(self, slot: Slot, foreign: _Foreign, given: Mapping[str, Any]) -> Any:
        """An input of the step, a buffer's rows, or what is bound."""
        if (name := foreign.inputs.get(slot.index)) is not None:
            return given.get(name)
        buffer = self._buffers.get(slot.index)
        if buffer is None:
            return self._bound[slot.index]
        rows, whole = buffer
        return whole[: self._step[1][rows]]


class _Foreign:
    """An op that Python calls."""

    def __init__(self, op: Op, function: Callable[..., None], inputs: Mapping[int, str]) -> None:
        """`inputs`: names of the step's own numbers among its arguments, by slot."""
        self.op = op
        self.function = function
        self.inputs = inputs

    def is_needed(self, given: Mapping[str, Any]) -> bool:
        """Whether a step has what the op takes of it: one that takes inputs is left out where all of them are None."""
        return not self.inputs or any(given.get(name) is not None for name in self.inputs.values())


_Stretch = tuple[int, int] | _Foreign
"""First and last + 1 of the native ops that run in one call, or an op that Python calls."""


def _joined(stretches: Iterable[_Stretch]) -> list[_Stretch]:
    """Native ops that follow each other run in one call."""
    joined: list[_Stretch] = []
    for stretch in stretches:
        last = joined[-1] if joined else None
        if isinstance(stretch, tuple) and isinstance(last, tuple):
            joined[-1] = last[0], stretch[1]
        else:
            joined.append(stretch)
    return joined


def slots_of(op: Op) -> Iterator[Slot]:
    """The slots among an op's arguments."""
    return (argument for argument in flat(op.arguments) if isinstance(argument, Slot))
