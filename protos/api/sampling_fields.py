"""The kinds of values that sampling fields take: how each is checked, described in JSON Schema and sent.

A field of `SamplingParams` is declared once, with `param(default, rule)`; `fields_of` reads the declarations back. From
them come the checks on construction, the HTTP request models and their OpenAPI ranges, the mapping from the public gRPC
messages, the payload for the ranks and the command line's flags.
"""

from __future__ import annotations

import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar

Json = dict[str, Any]
T = TypeVar("T")

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_ID_SEQUENCES = 1024
MAX_ID_SEQUENCE_LENGTH = 256
MAX_LOGIT_BIASES = 1024
MAX_TOKEN_ID = 2**31 - 1


class Rule(ABC):
    """The allowed values of one sampling field."""

    request_type: Any = None
    """The field's type in an HTTP request; None where requests ask for it under other names."""

    @abstractmethod
    def check(self, name: str, value: Any) -> Any:
        """The value as it is kept. Raises InvalidRequest naming the field."""

    def check_vocabulary(self, name: str, value: Any, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first token id of a checked value that is not below `vocab_size`."""
        return

    @property
    def schema(self) -> Json | None:
        """JSON Schema of its range, where `request_type` does not say it."""
        return None


def param(default: T, rule: Rule, masks: bool = False) -> T:
    """Declares a sampling field. `masks`: it may forbid tokens, all of them at worst."""
    return field(default=default, metadata={"rule": rule, "masks": masks})


def masks_of(params: type) -> tuple[str, ...]:
    """The fields that may forbid tokens."""
    return tuple(each.name for each in fields(params) if each.metadata["masks"])


def fields_of(params: type) -> dict[str, tuple[Any, Rule]]:
    """The default and the rule of each field, by name."""
    return {each.name: (each.default, each.metadata["rule"]) for each in fields(params)}


@dataclass(frozen=True)
class Integer(Rule):
    """An integer from `low` to `high`; or None, where it is `optional`."""

    low: int
    high: int
    optional: bool = False
    request_type: Any = int

    def check(self, name: str, value: Any) -> int | None:
        if not (value is None and self.optional):
            _integer(name, value, self.low, self.high)
        return value  # type: ignore[no-any-return]

    @property
    def schema(self) -> Json:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Number(Rule):
    """A finite number from `low` to `high`; above `low` where `instead` says what to do instead of giving it."""

    low: float
    high: float
    instead: str = ""
    request_type: Any = float

    def check(self, name: str, value: Any) -> float:
        number = _number(name, value, self.low, self.high)
        if self.instead and number == self.low:
            raise refusal(name, f"is {self.low:g}, must be in ({self.low:g}, {self.high:g}]; {self.instead}")
        return number

    @property
    def schema(self) -> Json:
        return {"type": "number", "exclusiveMinimum" if self.instead else "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Boolean(Rule):
    """True or false."""

    request_type: Any = bool

    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise refusal(name, f"is {shown(value)}, must be true or false")
        return value


@dataclass(frozen=True)
class TokenIds(Rule):
    """A list of at most `most` token ids, kept as a tuple."""

    most: int
    request_type: Any = list[int]

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        return _integers(name, value, self.most)

    def check_vocabulary(self, name: str, value: tuple[int, ...], vocab_size: int) -> None:
        _below(name, value, vocab_size)


@dataclass(frozen=True)
class TokenIdSequences(Rule):
    """A list of non-empty lists of token ids, kept as tuples."""

    request_type: Any = list[list[int]]

    def check(self, name: str, value: Any) -> tuple[tuple[int, ...], ...]:
        entries = _list(name, value, "lists of token ids", MAX_ID_SEQUENCES)
        sequences = tuple(_integers(f"{name}[{i}]", each, MAX_ID_SEQUENCE_LENGTH) for i, each in enumerate(entries))
        if () in sequences:
            raise refusal(f"{name}[{sequences.index(())}]", "is empty, must have at least one token id")
        return sequences

    def check_vocabulary(self, name: str, value: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
        for i, ids in enumerate(value):
            _below(f"{name}[{i}]", ids, vocab_size)


@dataclass(frozen=True)
class Strings(Rule):
    """A non-empty string or a list of them, kept as a tuple."""

    request_type: Any = str | list[str]

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        entries = (value,) if isinstance(value, str) else _list(name, value, "strings", MAX_STOP_STRINGS)
        for i, each in enumerate(entries):
            if not isinstance(each, str) or not each:
                raise refusal(f"{name}[{i}]", f"is {shown(each)}, must be a non-empty string")
            if len(each) > MAX_STOP_STRING_CHARS:
                raise refusal(f"{name}[{i}]", f"has {len(each)} characters, at most {MAX_STOP_STRING_CHARS}")
        return tuple(entries)


@dataclass(frozen=True)
class TokenBiases(Rule):
    """Numbers from -`most` to `most` by token id, kept as sorted pairs."""

    most: float
    request_type: Any = dict[str, float]

    def check(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        try:
            pairs = list(value.items() if isinstance(value, Mapping) else ((key, bias) for key, bias in value))
        except (TypeError, ValueError):
            raise refusal(name, f"is {shown(value)}, must map token ids to numbers") from None
        if len(pairs) > MAX_LOGIT_BIASES:
            raise refusal(name, f"has {len(pairs)} entries, at most {MAX_LOGIT_BIASES}")
        biases: dict[int, float] = {}
        for token_id, bias in pairs:
            _integer(f"{name} token id", token_id, 0, MAX_TOKEN_ID)
            if token_id in biases:
                raise refusal(name, f"names token id {token_id} twice, must name each once")
            biases[token_id] = _number(f"{name}[{token_id}]", bias, -self.most, self.most)
        return tuple(sorted(biases.items()))

    def check_vocabulary(self, name: str, value: tuple[tuple[int, float], ...], vocab_size: int) -> None:
        for token_id, _ in value:
            if token_id >= vocab_size:
                raise refusal(name, f"has token id {token_id}, must be from 0 to {vocab_size - 1}")


@dataclass(frozen=True)
class OptionalGrammar(Rule):
    """A grammar or None. HTTP requests ask for one with `response_format` and its like."""

    def check(self, name: str, value: Any) -> Grammar | None:
        if value is not None and not isinstance(value, Grammar):
            raise refusal(name, f"is {shown(value)}, must be a Grammar")
        return value


def refusal(place: str, problem: str) -> InvalidRequest:
    """`place` may go on with an entry's index ("bad_words_ids[3][0]"): the error carries the field's own name."""
    return InvalidRequest(f"{place} {problem}", re.split(r"\W", place, maxsplit=1)[0])


def shown(value: object) -> str:
    """A value of any length, shortened for a message of one line."""
    return reprlib.repr(value)


def _integer(place: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise refusal(place, f"is {shown(value)}, must be an integer")
    if not low <= value <= high:
        raise refusal(place, f"is {shown(value)}, must be from {low} to {high}")


def _number(place: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refusal(place, f"is {shown(value)}, must be a number")
    if not low <= value <= high:  # so NaN and infinities are refused too
        raise refusal(place, f"is {shown(value)}, must be from {low:g} to {high:g}")
    return float(value)


def _list(place: str, values: object, of: str, most: int) -> Sequence[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise refusal(place, f"is {shown(values)}, must be a list of {of}")
    if len(values) > most:
        raise refusal(place, f"has {len(values)} entries, at most {most}")
    return values


def _integers(place: str, values: object, most: int) -> tuple[int, ...]:
    entries = _list(place, values, "integers", most)
    for i, value in enumerate(entries):
        _integer(f"{place}[{i}]", value, 0, MAX_TOKEN_ID)
    return tuple(entries)


def _below(place: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        i = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        raise refusal(f"{place}[{i}]", f"is {ids[i]}, must be from 0 to {vocab_size - 1}")
