"""Grammars against whole texts, by a vocabulary of bytes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import llguidance

from allspan.protos.api.grammar import Grammar
from allspan.protos.text.grammar_compiler import LIMITS, lark_of

END = 256
REFUSED_CASES = {
    "unique items": "$.uniqueItems",
    "contains": "$.contains",
    "property names": "$.propertyNames",
    "if, then, else": "$.if",
    "not": "$.not",
    "unevaluated properties": "$.unevaluatedProperties",
}
"""Schemas of the corpus with a keyword that is not enforced, and where."""
OVERLAPPING = "oneOf whose arms overlap"
"""The one that the library refuses."""


def refused_names() -> set[str]:
    return {*REFUSED_CASES, OVERLAPPING}


class Bytes:
    """What llguidance asks of a tokenizer: 256 bytes and an end."""

    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes((value,)) for value in range(256)), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_vocabulary() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), eos_token=END)


def matcher(grammar: Grammar, vocabulary: Any = None) -> Any:
    """Before the first token."""
    vocabulary = vocabulary or byte_vocabulary()
    made = llguidance.LLMatcher(vocabulary, lark_of(grammar), log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    assert not made.is_error(), made.get_error()
    return made


def admits(grammar: Grammar, text: str) -> bool:
    """The whole text is of the grammar's language."""
    made, data = matcher(grammar), list(text.encode())
    return made.try_consume_tokens(data) == len(data) and bool(made.is_accepting())


def schema(value: Any) -> Grammar:
    """A JSON schema as a grammar."""
    return Grammar("json_schema", json.dumps(value))
