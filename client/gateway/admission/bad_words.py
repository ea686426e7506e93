"""Bad words given as text: the token sequences that would write them."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.text import Tokenizer

MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256


def bad_words_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the ids of each word as it begins a text and as it follows a space: most vocabularies have other tokens
    for the two.

    A word can still be spelled out in tokens that no tokenizer would choose for it. InvalidRequest names the word.
    """
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words has {len(words)} entries, at most {MAX_BAD_WORDS}", "bad_words")
    if tokenizer.is_apart:  # each text waits for a process, and this one has others to serve
        raise InvalidRequest(
            "bad_words cannot be texts with this model, whose tokenizer has rules of its own: give bad_words_ids",
            "bad_words",
        )
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        bare = word.strip(" ")
        if not bare:
            raise InvalidRequest(f"bad_words[{i}] is {word[:64]!r}, must hold more than spaces", "bad_words")
        if len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidRequest(
                f"bad_words[{i}] has {len(word)} characters, at most {MAX_BAD_WORD_CHARS}", "bad_words"
            )
        for text in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)
