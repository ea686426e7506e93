"""Grammar: the language that a request's output must be in, checked in form at the edge; the engine compiles it."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from typing import Any

from allspan.protos.api.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 2**18
MAX_CHOICES = 4096
KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class Grammar:
    """Validated on construction; raises InvalidRequest whose field is "grammar"."""

    kind: str
    """"json_object": any JSON object. "json_schema": JSON that `text`, a JSON Schema, describes. "regex": a text that
    `text`, a regular expression, matches as a whole. "choice": one of the strings of `text`, a JSON list. "grammar":
    a text that `text`, a grammar in Lark's notation, derives from its rule `start`."""
    text: str = ""
    """At most 262,144 characters; empty for "json_object"."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _refusal(f"kind is {reprlib.repr(self.kind)}, must be one of {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise _refusal(f"text is {reprlib.repr(self.text)}, must be text")
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise _refusal(f"text has {len(self.text)} characters, at most {MAX_GRAMMAR_CHARS}")
        if bool(self.text) is (self.kind == "json_object"):
            raise _refusal(
                "text is not empty, must be for json_object; a schema's kind is json_schema"
                if self.text
                else f"text is empty, must say the {self.kind}"
            )
        if not _is_unicode(self.text):
            raise _refusal("text has half of a surrogate pair, must be Unicode")
        if self.kind == "json_schema" and not isinstance(self._parsed(), (dict, bool)):
            raise _refusal(f"text is the schema {reprlib.repr(self._parsed())}, must be a JSON object")
        if self.kind == "choice":
            _check_choices(self._parsed())

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts of a "choice" grammar."""
        return tuple(json.loads(self.text))

    def _parsed(self) -> Any:
        try:
            return json.loads(self.text, parse_constant=_no_constant)
        except RecursionError:
            raise _refusal("text is nested too deeply, must be JSON of a depth that can be read") from None
        except ValueError as error:
            raise _refusal(f"text is no JSON: {error}") from None


def _check_choices(values: object) -> None:
    if not isinstance(values, list) or not values:
        raise _refusal(f"text is the choice {reprlib.repr(values)}, must be a list of at least one string")
    if len(values) > MAX_CHOICES:
        raise _refusal(f"text has {len(values)} choices, at most {MAX_CHOICES}")
    for i, value in enumerate(values):
        if not isinstance(value, str) or not value:
            raise _refusal(f"text[{i}] is {reprlib.repr(value)}, must be a non-empty string")
        if not _is_unicode(value):
            raise _refusal(f"text[{i}] has half of a surrogate pair, must be Unicode")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refusal(problem: str) -> InvalidRequest:
    return InvalidRequest(f"grammar's {problem}", "grammar")
