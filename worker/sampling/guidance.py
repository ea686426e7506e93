"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over lexers of derivatives of
regular expressions. Nothing else names it."""

from __future__ import annotations

import itertools
import json
import re
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from allspan.protos.errors import InvalidRequest
from allspan.protos.grammar import Grammar
from allspan.protos.text.tokenizer import Tokenizer
from allspan.worker.sampling.grammar import MatcherFailed, Words

MAX_DIVISOR = 10_000
"""Of a schema's multipleOf, as a whole number: each remainder is a state."""
MAX_GBNF_CHARS = 16_384
"""llama.cpp's grammars are translated by Python, which holds its lock meanwhile."""
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.0-9eE]+)')
_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""So that neither a mask nor a grammar's tables grow without bound. A mask at these limits takes some 10 ms."""
_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Every way to cut a text into tokens is allowed: other masks may forbid the usual one."""
_MOST_ERROR_CHARS = 400


class GuidanceCompiler:
    """Compiles grammars for one vocabulary. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: the model's, which may have more ids than the tokenizer, or fewer. Takes a second for 150,000
        tokens."""
        self._vocab_size = vocab_size
        self._table = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)),
            n_vocab=vocab_size + 1,
            eos_token=[vocab_size],
            slices=llguidance.LLTokenizer.json_slices(),
        )

    def compile(self, grammar: Grammar) -> GuidanceGrammar:
        """Raises InvalidRequest, saying what is wrong with it. Holds no lock of Python's meanwhile."""
        try:
            _check_multiples(grammar)
            text = _lark(grammar)
        except RecursionError:
            raise _refusal(grammar, "it is nested too deeply") from None
        first = llguidance.LLMatcher(self._table, text, log_level=0, limits=_LIMITS)
        if first.is_error():
            raise _refusal(grammar, first.get_error())
        # Grammars without any text at all are found out by their first mask.
        compiled = GuidanceGrammar(first, self._vocab_size)
        try:
            compiled.matcher().fill(np.zeros(-(-self._vocab_size // 32), dtype=np.int32))
        except MatcherFailed as error:
            raise _refusal(grammar, f"nothing can be said in it, or it is too large: {error}") from None
        return compiled


class _Vocabulary:
    """What llguidance asks of a tokenizer. The end is an id of ours behind the vocabulary: see `grammar`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        self.tokens = [tokenizer.codec.piece(token_id) for token_id in range(vocab_size)] + [b"<end>"]
        silent = {token_id for token_id, piece in enumerate(self.tokens) if not piece}
        # Special ids come in no text. Some tokenizers spell ids out that only fill the vocabulary up.
        ends = {*tokenizer.special_ids, *tokenizer.eos_token_ids}
        self.special_token_ids = sorted({vocab_size, *silent, *(i for i in ends if i < vocab_size)})
        self._encode = partial(tokenizer.codec.encode, parse_special=False)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class GuidanceGrammar:
    """See `grammar.CompiledGrammar`."""

    def __init__(self, first: Any, vocab_size: int) -> None:
        self._first = first
        self._vocab_size = vocab_size

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._first.deep_copy(), self._vocab_size)


class GuidanceMatcher:
    """See `grammar.Matcher`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = np.zeros(vocab_size // 32 + 1, dtype=np.int32)  # the end's bit, too
        self._address, self._bytes = self._words.ctypes.data, self._words.nbytes
        self._rest = np.int32((1 << vocab_size % 32) - 1)
        """Of the last word's bits, those that stand for tokens."""

    def consume(self, token_ids: list[int]) -> None:
        if token_ids and not self._matcher.consume_tokens(token_ids):
            raise MatcherFailed(_line(self._matcher.get_error()) or "a token is not of the grammar's language")

    def fill(self, mask: Words) -> bool:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
        if self._matcher.is_error():
            raise MatcherFailed(_line(self._matcher.get_error()))
        self._words[-1] &= self._rest
        mask[:] = self._words[: len(mask)]
        return bool(self._matcher.is_accepting())


def _lark(grammar: Grammar) -> str:
    """In llguidance's dialect of Lark."""
    kind, text = grammar.kind, grammar.text
    if kind == "json_object":
        body = 'start: %json {"type": "object"}'
    elif kind == "json_schema":
        body = f"start: %json {json.dumps(json.loads(text))}"
    elif kind == "regex":
        body = f"start: /{llguidance.regex_to_lark(text, use_ascii='d')}/"
    elif kind == "choice":
        body = "start: " + " | ".join(map(json.dumps, grammar.choices))
    elif is_lark_syntax(text):
        body = text
    elif len(text) > MAX_GBNF_CHARS:
        raise _refusal(grammar, f"it has no rule `start`; as GBNF it is too long, at most {MAX_GBNF_CHARS} characters")
    else:
        try:
            body = gbnf_to_lark(text)
        except Exception as error:  # the library raises plain Exception
            raise _refusal(grammar, f"no rule `start`, and as GBNF: {error}") from None
    return _OPTIONS + body


def _check_multiples(grammar: Grammar) -> None:
    """Numbers that the library would take minutes and gigabytes for."""
    text = json.dumps(json.loads(grammar.text)) if grammar.kind == "json_schema" else grammar.text
    for match in _MULTIPLE.finditer(text):
        try:
            _, digits, exponent = Decimal(match[1]).normalize().as_tuple()
        except InvalidOperation:
            continue  # no number: the library says so
        if len(digits) + max(int(exponent), 0) > len(str(MAX_DIVISOR)) - 1:
            raise _refusal(grammar, f"multipleOf is {match[1][:40]}, must be less than {MAX_DIVISOR} without its point")


def _refusal(grammar: Grammar, problem: str) -> InvalidRequest:
    return InvalidRequest(f"grammar is no {grammar.kind} that can be followed: {_line(problem)}", "grammar")


def _line(text: str) -> str:
    """On one line, and short: the library quotes what it was given."""
    kept = itertools.takewhile(lambda line: not re.match(r"\s*\d+ \|", line), text.split("\n"))
    line = " ".join(" ".join(kept).replace("<non-verbose/>", "").split())
    return line if len(line) <= _MOST_ERROR_CHARS else line[:_MOST_ERROR_CHARS] + " …"
