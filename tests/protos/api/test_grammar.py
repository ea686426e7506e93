"""Grammars: in form, or refused as the field "grammar" in one short line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARS, Grammar

BAD: list[tuple[Any, Any, str]] = [
    ("json", "{}", "kind is 'json'"),
    (None, "{}", "kind is None"),
    ("x" * 10**6, "", "kind is 'xxx"),
    ("json_object", "{}", "text is not empty"),
    ("json_schema", "", "text is empty"),
    ("regex", "", "text is empty"),
    ("regex", b"a", "text is b'a'"),
    ("grammar", "x" * (MAX_GRAMMAR_CHARS + 1), f"text has {MAX_GRAMMAR_CHARS + 1} characters"),
    ("regex", "\ud800", "half of a surrogate pair"),
    ("json_schema", "[]", "text is the schema []"),
    ("json_schema", "null", "text is the schema None"),
    ("json_schema", "{", "no JSON"),
    ("json_schema", '{"minimum": NaN}', "no JSON"),
    ("json_schema", '{"maximum": ' + "9" * 5000 + "}", "no JSON"),
    ("json_schema", '{"a":' * 40_000 + "1" + "}" * 40_000, "too deeply"),
    ("choice", '"a"', "must be a list"),
    ("choice", "[]", "must be a list"),
    ("choice", '["a", ""]', r"text[1] is ''"),
    ("choice", '["a", 1]', r"text[1] is 1"),
    ("choice", '["\\ud800"]', r"text[0] has half of a surrogate pair"),
    ("choice", json.dumps(["a"] * (MAX_CHOICES + 1)), f"text has {MAX_CHOICES + 1} choices"),
]


@pytest.mark.parametrize(("kind", "text", "problem"), BAD, ids=[problem[:24] for _, _, problem in BAD])
def test_a_bad_grammar_is_refused_in_one_short_line(kind: Any, text: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Grammar(kind, text)
    assert caught.value.field == "grammar"
    assert problem in caught.value.message
    assert len(caught.value.message) < 400
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_object", ""), ("json_schema", "true"), ("json_schema", "{}"), ("regex", "a\nb"), ("grammar", "start: /a/")],
)
def test_a_grammar_is_a_value(kind: str, text: str) -> None:
    assert Grammar(kind, text) == Grammar(kind, text)
    assert len({Grammar(kind, text), Grammar(kind, text)}) == 1


def test_choices_are_strings() -> None:
    assert Grammar("choice", '["a", "ä"]').choices == ("a", "ä")
