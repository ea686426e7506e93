"""The tensors that a pickle of `torch.save` describes, read by an interpreter of our own: it knows the few instructions
and names that a dict of tensors needs, calls nothing, and refuses every other by name.

The pickle (Python's pickle protocols 2 to 5) makes a dict of names and tensors. A tensor is
`torch._utils._rebuild_tensor_v2(storage, first element, shape, stride, …)`, of a storage with the persistent id
("storage", class, key, device, elements), whose bytes are another record of the archive.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.json_values import shown
from allspan.protos.model_files.limits import (
    MAX_PICKLE_INSTRUCTIONS,
    MAX_TENSOR_DIMS,
    MAX_TENSOR_NAME,
    MAX_TENSOR_SIZE,
    MAX_TENSORS,
)

STORAGES = {
    "torch DoubleStorage": "F64",
    "torch FloatStorage": "F32",
    "torch BFloat16Storage": "BF16",
    "torch HalfStorage": "F16",
    "torch LongStorage": "I64",
    "torch IntStorage": "I32",
    "torch ShortStorage": "I16",
    "torch CharStorage": "I8",
    "torch ByteStorage": "U8",
    "torch BoolStorage": "BOOL",
}
"""The classes of storages, and their dtypes as safetensors names them."""
_ORDERED_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_GLOBALS = {*STORAGES, _ORDERED_DICT, _TENSOR, _PARAMETER}
_WAY_OUT = "save the model's state_dict() as safetensors where it comes from"


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A record of the archive: `count` elements of `dtype`."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor without holes whose first element is element `first` of its storage."""

    storage: PickledStorage
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


class _Mark:
    pass


def pickled_tensors(data: bytes, source: str) -> dict[str, PickledTensor]:
    """Name → tensor, as the pickle `data` says. Raises CheckpointError naming the `source` and what it cannot hold."""
    return _Interpreter(source).run(data)


@dataclass(slots=True)
class _Interpreter:
    source: str
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, data: bytes) -> dict[str, PickledTensor]:
        count = 0
        try:
            for opcode, argument, position in pickletools.genops(io.BytesIO(data)):
                count += 1
                if count > MAX_PICKLE_INSTRUCTIONS:
                    self._refuse(f"has more than {MAX_PICKLE_INSTRUCTIONS} instructions, which is the limit")
                if opcode.name == "STOP":
                    break
                act = _ACTIONS.get(opcode.name)
                if act is None:
                    self._refuse(f"instruction {opcode.name} at byte {position}, which no dict of tensors needs")
                act(self, argument)
        except (ValueError, IndexError, KeyError, TypeError, UnicodeError) as error:
            raise CheckpointError(f"{self.source}: not a sound pickle of tensors: {_reason(error)}") from error
        found = self.stack[-1] if len(self.stack) == 1 else None
        if not isinstance(found, dict) or not found:
            self._refuse(f"holds {_kind(found) if found != {} else 'no tensor'}, must be a dict of tensors")
        return self._checked(found)

    def _checked(self, found: Mapping[Any, Any]) -> dict[str, PickledTensor]:
        if len(found) > MAX_TENSORS:
            self._refuse(f"{len(found)} tensors, must be at most {MAX_TENSORS}")
        for name, value in found.items():
            if not isinstance(value, PickledTensor):
                self._refuse(f"entry {shown(name)} is {_kind(value)}, must be a tensor")
        return dict(found)

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.source}: {what}: {_WAY_OUT}")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        """Takes what was pushed since the last mark, and the mark."""
        taken = []
        while not isinstance(top := self.stack.pop(), _Mark):
            taken.append(top)
        return taken[::-1]

    def remember(self, index: int | None = None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def take_global(self, name: str) -> None:
        if name not in _GLOBALS:
            self._refuse(f"the name {shown(name)}, which no dict of tensors needs")
        self.push(_Global(name))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            self._refuse("a name that is no text")
        self.take_global(f"{module} {name}")

    def storage(self) -> None:
        identity = self.stack.pop()
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            self._refuse("a persistent id that is not ('storage', class, key, device, elements)")
        _, kind, key, _, count = identity
        if not isinstance(kind, _Global) or kind.name not in STORAGES or not isinstance(key, str):
            self._refuse(f"a storage that is none of {', '.join(STORAGES)}")
        if type(count) is not int or not 0 <= count <= MAX_TENSOR_SIZE:
            self._refuse(f"a storage of {_kind(count)} elements, must be from 0 to {MAX_TENSOR_SIZE}")
        self.push(PickledStorage(STORAGES[kind.name], key, count))

    def reduce(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, _Global) or not isinstance(arguments, tuple):
            self._refuse(f"a call of {_kind(called)}")
        if called.name == _ORDERED_DICT and not arguments:
            self.push({})
        elif called.name == _TENSOR and len(arguments) in (6, 7):
            self.push(self._tensor(*arguments[:4]))
        elif called.name == _PARAMETER and arguments and isinstance(arguments[0], PickledTensor):
            self.push(arguments[0])
        else:
            self._refuse(f"a call of {called.name} with {len(arguments)} arguments")

    def _tensor(self, storage: Any, first: Any, shape: Any, stride: Any) -> PickledTensor:
        numbers = (first, *shape, *stride) if isinstance(shape, tuple) and isinstance(stride, tuple) else (None,)
        if not isinstance(storage, PickledStorage) or len(numbers) != 1 + 2 * len(shape):
            self._refuse("a tensor without a storage, a shape and a stride")
        if len(shape) > MAX_TENSOR_DIMS or any(type(n) is not int or not 0 <= n <= MAX_TENSOR_SIZE for n in numbers):
            self._refuse(
                f"a tensor whose first element, shape and stride are not at most {1 + 2 * MAX_TENSOR_DIMS} integers "
                f"from 0 to {MAX_TENSOR_SIZE}"
            )
        elements, step = math.prod(shape), 1
        for size, found in zip(reversed(shape), reversed(stride), strict=True):
            if elements and size > 1 and found != step:
                self._refuse(f"a tensor of shape {shown(shape)} with stride {shown(stride)}, whose elements do not lie "
                             "one after the other (call contiguous() first)")  # fmt: skip
            step *= size
        if first + elements > storage.count:
            self._refuse(
                f"a tensor of shape {shown(shape)} from element {first} on, of a storage of {storage.count} elements"
            )
        return PickledTensor(storage, first, shape)

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            self._refuse(f"items that are set in {_kind(target)}")
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(name, str) or len(name) > MAX_TENSOR_NAME:
                self._refuse(f"a key that is {_kind(name)}, must be a name of at most {MAX_TENSOR_NAME} characters")
            if name in target and isinstance(value, PickledTensor):
                self._refuse(f"the tensor {shown(name)} twice")
            target[name] = value

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            self._refuse(f"values that are appended to {_kind(self.stack[-1])}")
        self.stack[-1].extend(values)

    def drop_state(self) -> None:
        """A state_dict has versions of its modules as an attribute, which nothing here needs."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], dict) or not isinstance(state, dict) or state.keys() - {"_metadata"}:
            self._refuse(f"a state that is given to {_kind(self.stack[-1])}")

    def tuple_of(self, count: int) -> None:
        taken = [self.stack.pop() for _ in range(count)]
        self.push(tuple(taken[::-1]))

    def set_item(self) -> None:
        value, name = self.stack.pop(), self.stack.pop()
        self.set_items([name, value])


def _kind(value: Any) -> str:
    """What a value is, in words: values may refer to themselves, and are never shown whole."""
    if value is None or isinstance(value, bool | int | float | str):
        return shown(value)
    if isinstance(value, _Global):
        return f"the name {value.name!r}"
    names = {PickledTensor: "a tensor", PickledStorage: "a storage", dict: "a dict", list: "a list", tuple: "a tuple"}
    return names.get(type(value), "no value")


def _reason(error: Exception) -> str:
    text = str(error).splitlines()
    return shown(text[0]) if text and isinstance(error, ValueError) else "its instructions do not fit each other"


_Action = Callable[[_Interpreter, Any], Any]


def _ignore(machine: _Interpreter, argument: Any) -> None:
    pass


def _push(machine: _Interpreter, argument: Any) -> None:
    machine.push(argument)


def _recall(machine: _Interpreter, index: int) -> None:
    machine.push(machine.memo[index])


_ACTIONS: dict[str, _Action] = {
    **dict.fromkeys(("PROTO", "FRAME"), _ignore),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _push),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Interpreter.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _recall),
    "MEMOIZE": lambda machine, _: machine.remember(),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "MARK": lambda machine, _: machine.push(_Mark()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_item(),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "GLOBAL": _Interpreter.take_global,
    "STACK_GLOBAL": lambda machine, _: machine.stack_global(),
    "BINPERSID": lambda machine, _: machine.storage(),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.drop_state(),
}
"""What each instruction does; there are no others."""
