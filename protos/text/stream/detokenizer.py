"""Turns tokens into text as they come, with a bounded amount of work for each."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from allspan.protos.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """Text of one output, in pieces that never hold half a character.

    All pieces together and `finish()` equal `tokenizer.decode` of all ids. `continues` says that the tokens follow a
    prompt whose text stands before them: then a first word keeps its space.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strip_space = tokenizer.strips_leading_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that these tokens add; bytes of an unfinished character wait for the rest."""
        data = b"".join(self._tokenizer.pieces(ids, self._skip_special_tokens))
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The rest, at the end of the output: U+FFFD if it ends within a character, else nothing."""
        return self._decoder.decode(b"", final=True)
