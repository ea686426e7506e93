"""The process that compiles callers' grammars first, where exceeding a limit ends no other process.

It answers each question ({"kind", "text"}) with {"problem": ""} when the grammar compiles and can begin an output, else
with what is wrong. Started by `grammar_check`, with its limits: seconds of a processor for each, and bytes of memory.
The first question is about the model: {"vocab_size", "special": {token id: text}}.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import llguidance

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.text.grammar_compiler import LIMITS, lark_of, on_deep_stack, refusal
from allspan.protos.text.helper_child import limit_memory, questions, reply

STACK_BYTES = 2**28
"""Half of what the ranks compile on: what passes here passes there."""
ARENA_BYTES = 2**26
"""Bytes that the C library maps for a thread's small allocations."""


class StandIn:
    """A vocabulary of single bytes and the model's special tokens under their ids, so that no tokenizer is loaded."""

    bos_token_id = None

    def __init__(self, vocab_size: int, special: Mapping[int, str]) -> None:
        size = max(vocab_size, 256 + len(special))
        self.tokens = [b""] * size + [b"<end>"]
        for token_id, text in special.items():
            self.tokens[token_id] = text.encode()
        free = (token_id for token_id in range(size) if token_id not in special)
        self._ids = [next(free) for _ in range(256)]
        for value, token_id in enumerate(self._ids):
            self.tokens[token_id] = bytes((value,))
        self.eos_token_id = size
        self.special_token_ids = sorted({*special, size})

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._ids[value] for value in (text.encode() if isinstance(text, str) else text)]


def main() -> None:
    """Compiles grammars until standard input ends."""
    os.nice(5)  # beside a rank on every processor it must still get on
    asked = questions()
    model = next(asked)
    special = {int(token_id): text for token_id, text in model["special"].items()}
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(StandIn(model["vocab_size"], special)))
    seconds, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    limit_memory(STACK_BYTES + ARENA_BYTES + memory_bytes)
    reply({})
    for question in asked:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of a processor; then the process is killed
        problem = _problem(vocabulary, question["kind"], question["text"])
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        reply({"problem": problem})


def _problem(vocabulary: Any, kind: str, text: str) -> str:
    try:
        grammar = Grammar(kind, text)
        on_deep_stack(lambda: _compile(vocabulary, grammar), STACK_BYTES)
    except InvalidRequest as error:
        return error.message
    except MemoryError:
        return f"grammar is no {kind} that can be followed: it takes too much memory"
    return ""


def _compile(vocabulary: Any, grammar: Grammar) -> None:
    matcher = llguidance.LLMatcher(
        vocabulary, lark_of(grammar), log_level=0, limits=llguidance.LLParserLimits(**LIMITS)
    )
    if not matcher.is_error():
        matcher.compute_bitmask()  # some limits, and languages without any text, show in the first mask only
    if matcher.is_error():
        raise refusal(grammar, matcher.get_error())


if __name__ == "__main__":
    main()
