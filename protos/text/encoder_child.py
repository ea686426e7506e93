"""The process that encodes with tokenizers whose rules are a model's own: a regular expression may never end, or panic.

A question is {"id", "text", "special", "wrap", "within_s"}; "source" (a tokenizer.json) is left out once the process
has it. An answer has one of "ids", "problem" or "unknown" (no source yet). Started by `apart_codec`, with the bytes of
memory that it may take.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from tokenizers import Tokenizer

from allspan.protos.text.helper_child import limit_memory, questions, reply

MAX_TOKENIZERS = 2
"""One, and the same with its control tokens spelled otherwise."""
_SLACK_S = 1.0


def answer(known: dict[str, tuple[Tokenizer, Tokenizer]], question: dict[str, Any]) -> dict[str, Any]:
    """`known`: id → a tokenizer that parses the texts of special tokens, and one that does not."""
    if question["id"] not in known:
        if "source" not in question:
            return {"unknown": True}
        parsing, literal = (Tokenizer.from_str(question["source"]) for _ in range(2))
        literal.encode_special_tokens = True
        if len(known) >= MAX_TOKENIZERS:
            known.clear()
        known[question["id"]] = parsing, literal
    parsing, literal = known[question["id"]]
    tokenizer = parsing if question["special"] else literal
    return {"ids": list(tokenizer.encode(question["text"], add_special_tokens=question["wrap"]).ids)}


def main() -> None:
    """Answers until standard input ends."""
    limit_memory(int(sys.argv[1]))
    asked = questions()
    next(asked, None)  # the greeting
    reply({})
    known: dict[str, tuple[Tokenizer, Tokenizer]] = {}
    for question in asked:
        # Should the parent be gone when an expression does not end.
        signal.setitimer(signal.ITIMER_REAL, question["within_s"] + _SLACK_S)
        try:
            found = answer(known, question)
        except BaseException as error:  # a panic of the library is no Exception
            found = {"problem": " ".join(str(error)[:10_000].split())[:300] or type(error).__name__}
        reply(found)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


if __name__ == "__main__":
    main()
