"""Compiles a `Grammar` with llguidance, the library that masks tokens: the same text and limits wherever it is
compiled."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.text.schema_keywords import check_keywords, simplified

MAX_DEPTH = 96
"""Deepest nesting of a schema's text; the library reads 128."""
STACK_BYTES = 2**29
"""Stack size of a thread that compiles: the library's recursion is as deep as the references among a grammar's
rules."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""The white space allowed between JSON's tokens, bounded: a model may otherwise write nothing else for ever."""

LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Arguments of llguidance.LLParserLimits, so that neither a grammar's tables nor a mask grow without bound."""
MAX_DIVISOR_DIGITS = 4
"""Most digits of a schema's multipleOf, as a whole number: each remainder is a state."""
MAX_EBNF_CHARS = 16_384
"""Grammars of `::=` rules are translated by Python, which holds its lock meanwhile."""
_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""The options of llguidance: every way to cut a text into tokens is allowed, because other masks may forbid the usual
one."""
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.0-9eE]+)')
_MOST_ERROR_CHARS = 400

T = TypeVar("T")


def lark_of(grammar: Grammar) -> str:
    """The grammar in llguidance's dialect of Lark; InvalidRequest (field "grammar") names what cannot be enforced."""
    kind, text = grammar.kind, grammar.text
    try:
        if kind == "json_object":
            body = _json({"type": "object"})
        elif kind == "json_schema":
            body = _json(_schema(grammar))
        elif kind == "regex":
            body = _of_regex(text)
        elif kind == "choice":
            body = "start: " + " | ".join(map(json.dumps, grammar.choices))
        else:
            body = _of_rules(grammar)
        _check_multiples(grammar, body)
    except RecursionError:
        raise refusal(grammar, "it is nested too deeply") from None
    return _OPTIONS + body


def refusal(grammar: Grammar, problem: str) -> InvalidRequest:
    """Returns the error for a grammar that the library refuses, with the library's message."""
    return InvalidRequest(f"grammar is no {grammar.kind} that can be followed: {one_line(problem)}", "grammar")


def one_line(problem: str) -> str:
    """Returns the library's message as one short line: it quotes its input."""
    kept = itertools.takewhile(lambda line: not re.match(r"\s*\d+ \|", line), problem.split("\n"))
    line = " ".join(" ".join(kept).replace("<non-verbose/>", "").split())
    return line if len(line) <= _MOST_ERROR_CHARS else line[:_MOST_ERROR_CHARS] + " …"


def on_deep_stack(function: Callable[[], T], stack_bytes: int = STACK_BYTES) -> T:
    """Runs it in a thread with so much stack, and waits."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(function())
        except BaseException as error:
            failed.append(error)

    with _starting:
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


_starting = threading.Lock()  # the size of the next thread's stack is the whole process's


def _json(schema: object) -> str:
    """`schema` with the library's options at its root."""
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    if isinstance(schema, dict):
        schema = schema | options
    elif schema is True:
        schema = options
    return f"start: %json {json.dumps(schema)}"


def _schema(grammar: Grammar) -> object:
    depth = deepest(grammar.text)
    if depth > MAX_DEPTH:
        raise refusal(grammar, f"it is nested {depth} levels deep, at most {MAX_DEPTH}")
    schema: object = json.loads(grammar.text)
    check_keywords(schema)
    return simplified(schema)


def deepest(text: str) -> int:
    """Returns the number of brackets of a JSON text that are open at once."""
    depth = most = 0
    for sign in _SIGNS.findall(text):
        if sign in "{[":
            depth += 1
            most = max(most, depth)
        elif sign in "}]":
            depth -= 1
    return most


_SIGNS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]')


def _of_regex(text: str) -> str:
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(text, use_ascii='d')}/"


def _of_rules(grammar: Grammar) -> str:
    """Lark as it is; rules with `::=` (EBNF as llama.cpp and others write it, from the rule `root`) translated."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    text = grammar.text
    if is_lark_syntax(text):
        return text
    if len(text) > MAX_EBNF_CHARS:
        raise refusal(
            grammar, f"it has no rule `start`; as EBNF it has {len(text)} characters, at most {MAX_EBNF_CHARS}"
        )
    try:
        lark: str = gbnf_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise refusal(grammar, f"it has no rule `start`, and as EBNF: {error}") from None
    return lark


def _check_multiples(grammar: Grammar, body: str) -> None:
    """Numbers that the library would take minutes and gigabytes for."""
    for match in _MULTIPLE.finditer(body):
        try:
            _, digits, exponent = Decimal(match[1]).normalize().as_tuple()
        except InvalidOperation:
            continue  # no number: the library says so
        if len(digits) + max(int(exponent), 0) > MAX_DIVISOR_DIGITS:
            raise refusal(
                grammar, f"multipleOf is {match[1][:40]}, must be less than {10**MAX_DIVISOR_DIGITS} without its point"
            )
