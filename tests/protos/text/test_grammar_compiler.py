"""What grammars admit, and what is refused with the keyword and its path."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.text.grammar_compiler import STACK_BYTES, deepest, lark_of, on_deep_stack
from allspan.protos.text.schema_keywords import ENFORCED, FORMATS, REFUSED, REFUSED_FORMATS
from support.json_schemas import Case, cases
from support.matching import OVERLAPPING, REFUSED_CASES, admits, matcher, refused_names, schema


def named(*, refused: bool) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases() if (case.name in refused_names()) is refused]


@pytest.mark.parametrize("case", named(refused=False))
def test_a_schema_admits_what_is_valid_and_nothing_else(case: Case) -> None:
    grammar = schema(case.schema)
    for value in case.valid:
        assert admits(grammar, json.dumps(value, ensure_ascii=False)), value
        assert admits(grammar, json.dumps(value, ensure_ascii=False, indent=2)), value
        assert admits(grammar, json.dumps(value, ensure_ascii=False, separators=(",", ":"))), value
    for value in case.invalid:
        assert not admits(grammar, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize("case", [case for case in named(refused=True) if case.id != OVERLAPPING])
def test_a_keyword_that_is_not_enforced_is_refused_by_its_path(case: Case) -> None:
    with pytest.raises(InvalidRequest, match="is not supported") as caught:
        lark_of(schema(case.schema))
    assert caught.value.message.startswith(REFUSED_CASES[case.name] + ": ")
    assert caught.value.field == "grammar"


def test_arms_of_oneof_that_overlap_are_refused() -> None:
    overlapping = next(case for case in cases() if case.name == OVERLAPPING)
    with pytest.raises(AssertionError, match="oneOf"):
        matcher(schema(overlapping.schema))


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ({"properties": {"a": {"items": {"not": {}}}}}, "$.properties.a.items.not"),
        ({"anyOf": [{}, {"patternProperties": {"^x y": {"if": {}}}}]}, "$.anyOf[1].patternProperties['^x y'].if"),
        ({"$defs": {"x": {"not": {}}}, "items": {"$ref": "#/$defs/x"}}, "$.$defs.x.not"),
        ({"definitions": {"a/b": {"not": {}}}, "allOf": [{"$ref": "#/definitions/a~1b"}]}, "$.definitions['a/b'].not"),
        ({"prefixItems": [{"type": "string", "format": "regex"}]}, "$.prefixItems[0].format"),
        ({"$ref": "https://example.org/schema"}, "$.$ref"),
        ({"properties": {"a": {"x-guidance": {"lenient": True}}}}, "$.properties.a.x-guidance"),
    ],
)
def test_the_path_leads_to_the_keyword(part: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lark_of(schema(part))
    assert caught.value.message.startswith(path + ": ")


@pytest.mark.parametrize("keyword", REFUSED)
def test_every_refused_keyword_is_refused(keyword: str) -> None:
    with pytest.raises(InvalidRequest, match="is not supported"):
        lark_of(schema({keyword: {"const": 1}}))


@pytest.mark.parametrize("name", REFUSED_FORMATS)
def test_every_refused_format_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not supported"):
        lark_of(schema({"type": "string", "format": name}))


def test_the_corpus_uses_every_keyword_and_format_that_is_said_to_be_enforced() -> None:
    text = json.dumps([case.schema for case in cases()])
    assert [name for name in ENFORCED if f'"{name}"' not in text] == []
    assert [name for name in FORMATS if f'"{name}"' not in text] == []


@pytest.mark.parametrize(
    "idle",
    [
        {"uniqueItems": False},
        {"unevaluatedProperties": True},
        {"propertyNames": {}},
        {"format": "password"},
        {"minContains": 0},
        {"dependentRequired": {}},
        {"nullable": True, "title": "not a rule"},
    ],
)
def test_a_keyword_that_asks_for_nothing_is_taken(idle: Any) -> None:
    assert admits(schema({"type": "object", "properties": {"a": idle}}), '{"a": [1]}')


def test_names_of_properties_and_values_are_no_keywords() -> None:
    odd = {"type": "object", "properties": {"not": {"const": {"if": 1, "format": "regex"}}}, "required": ["not"]}
    assert admits(schema(odd), '{"not": {"if": 1, "format": "regex"}}')


def test_white_space_has_an_end() -> None:
    assert admits(schema({"type": "array"}), "[" + " " * 32 + "1]")
    assert not admits(schema({"type": "array"}), "[" + " " * 33 + "1]")


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            Grammar("json_object"),
            ['{"a": [1, null]}', "{}"],
            ["[]", "1", '{"a": 1'],
        ),
        (Grammar("regex", "^[a-c]+/\\d{2}$"), ["ab/12"], ["ab/1", "ab/123", "/12"]),
        (Grammar("regex", "(a|b)*"), ["", "ab"], ["c"]),
        (Grammar("choice", json.dumps(['a "b"', "a", "ü/*x*/\n"])), ['a "b"', "a", "ü/*x*/\n"], ["b", "aa", ""]),
        (Grammar("grammar", 'start: NAME ("," NAME)*\nNAME: /[a-z]+/'), ["a", "a,bc"], ["a,", ""]),
        (Grammar("grammar", 'root ::= name ("," name)*\nname ::= [a-z]+'), ["a", "a,bc"], ["a,", ""]),
    ],
)
def test_grammars_of_the_other_kinds(grammar: Grammar, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not admits(grammar, text)] == []
    assert [text for text in bad if admits(grammar, text)] == []


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("grammar", "root ::= (", "as EBNF: Expected"),
        ("grammar", "root ::= " + '"a" ' * 5000, "at most 16384"),
        ("grammar", "nothing at all", "no rule `start`"),
        ("json_schema", '{"multipleOf": 99991}', "multipleOf is 99991, must be less than 10000"),
        ("json_schema", '{"items": ' * 100 + "{}" + "}" * 100, "nested 101 levels deep, at most 96"),
    ],
)
def test_what_is_refused_before_it_is_compiled(kind: str, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        lark_of(Grammar(kind, text))
    assert "\n" not in caught.value.message


def test_depth_does_not_count_brackets_within_strings() -> None:
    assert deepest('{"a": ["[[{\\"[", {}]}') == 3


def test_compiling_has_a_stack_for_the_longest_chain_of_references() -> None:
    chain = {str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(2500)}
    grammar = schema({"$defs": chain | {"2500": {"type": "integer"}}, "$ref": "#/$defs/0"})
    on_deep_stack(lambda: matcher(grammar))  # a thread's usual 8 MiB end at some 500: the process would die


def test_a_deep_stack_hands_results_and_errors_back_and_leaves_other_threads_theirs() -> None:
    def fail() -> None:
        raise ValueError("here")

    before = threading.stack_size()
    assert on_deep_stack(lambda: 7) == 7
    with pytest.raises(ValueError, match="here"):
        on_deep_stack(fail)
    assert threading.stack_size() == before != STACK_BYTES


def test_the_tables_of_the_docs_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[3] / "docs/structured-output.md").read_text()
    section = text.split("## JSON Schema\n")[1].split("\n## ")[0]
    rows = [re.findall(r"`([^`\"]+)`", line.split("|")[2]) for line in section.splitlines() if line.startswith("| ")]
    tables = [row for row in rows if row]
    assert tables == [list(ENFORCED), list(FORMATS), list(REFUSED), list(REFUSED_FORMATS)]
