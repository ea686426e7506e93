"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over lexers of derivatives of
regular expressions. Nothing else names it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import llguidance
import numpy as np

from allspan.protos.api.grammar import Grammar
from allspan.protos.text.grammar_compiler import LIMITS, lark_of, on_deep_stack, one_line, refusal
from allspan.protos.text.tokenizers.tokenizer import Tokenizer
from allspan.worker.sampling.grammar import MatcherFailed, Words

MAX_AGAIN_S = 0.2
"""A grammar that was compiled in less may be compiled again within a step."""
_LIMITS = llguidance.LLParserLimits(**LIMITS)


class GuidanceCompiler:
    """Compiles grammars for one vocabulary. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: the model's, which may have more ids than the tokenizer, or fewer. Takes a second for 150,000
        tokens."""
        self._vocab_size = vocab_size
        self._encode = partial(tokenizer.codec.encode, parse_special=False)
        self._table = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)),
            n_vocab=vocab_size + 1,
            eos_token=[vocab_size],
            slices=llguidance.LLTokenizer.json_slices(),
        )

    def compile(self, grammar: Grammar) -> GuidanceGrammar:
        """Raises InvalidRequest, saying what is wrong with it. Holds no lock of Python's meanwhile."""
        text = lark_of(grammar)
        try:
            compiled = GuidanceGrammar(partial(self._start, text), self._vocab_size, self._encode)
        except MatcherFailed as error:
            raise refusal(grammar, str(error)) from None
        try:  # grammars without any text at all are found out by their first mask
            compiled.matcher().fill(np.zeros(-(-self._vocab_size // 32), dtype=np.int32))
        except MatcherFailed as error:
            raise refusal(grammar, f"nothing can be said in it, or it is too large: {error}") from None
        return compiled

    def _start(self, text: str) -> Any:
        started = on_deep_stack(lambda: llguidance.LLMatcher(self._table, text, log_level=0, limits=_LIMITS))
        if started.is_error():
            raise MatcherFailed(one_line(started.get_error()))
        return started


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

    def __init__(self, start: Callable[[], Any], vocab_size: int, encode: Callable[[str], list[int]]) -> None:
        """`start` compiles it; `encode` makes tokens of a text. Raises MatcherFailed."""
        self._encode = encode
        self._start = start
        self._vocab_size = vocab_size
        began = time.perf_counter()
        self._first = start()
        self._compile_s = time.perf_counter() - began

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._first.deep_copy(), self._vocab_size, self._encode)

    def own_matcher(self) -> GuidanceMatcher:
        """Copies share their lexer, whose states are counted for all of them together."""
        if self._compile_s > MAX_AGAIN_S:
            raise MatcherFailed("its tables are full, and take too long to be made again")
        self._first = self._start()
        return GuidanceMatcher(self._start(), self._vocab_size, self._encode)


class GuidanceMatcher:
    """See `grammar.Matcher`."""

    def __init__(self, matcher: Any, vocab_size: int, encode: Callable[[str], list[int]]) -> None:
        self._matcher = matcher
        self._encode = encode
        self._words = np.zeros(vocab_size // 32 + 1, dtype=np.int32)  # the end's bit, too
        self._address, self._bytes = self._words.ctypes.data, self._words.nbytes
        self._rest = np.int32((1 << vocab_size % 32) - 1)
        """The bits of the last word that stand for tokens."""

    def consume(self, token_ids: list[int]) -> None:
        if token_ids and not self._matcher.consume_tokens(token_ids):
            raise MatcherFailed(one_line(self._matcher.get_error()) or "a token is not of the grammar's language")

    def accepts(self, token_ids: list[int]) -> int:
        return int(self._matcher.validate_tokens(token_ids))

    def forced(self) -> list[int]:
        text = self._matcher.compute_ff_bytes()
        return self._encode(text.decode("utf-8", "ignore")) if text else []

    def rollback(self, count: int) -> None:
        if not self._matcher.rollback(count):
            raise MatcherFailed(one_line(self._matcher.get_error()) or f"{count} tokens cannot be taken back")

    def fill(self, mask: Words) -> bool:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
        if self._matcher.is_error():
            raise MatcherFailed(one_line(self._matcher.get_error()))
        self._words[-1] &= self._rest
        mask[:] = self._words[: len(mask)]
        return bool(self._matcher.is_accepting())
