"""Whether two models mean the same text by a token id."""

from __future__ import annotations

from pathlib import Path

_FILE = "tokenizer.json"


def first_difference(one: Path, other: Path) -> str:
    """Says of the first id that is another text in the other model's vocabulary which texts these are; "" where there
    is none. Ids that one of them lacks are passed over, and control tokens, which are no text. Raises CheckpointError
    or ModelNotFound where one has no tokenizer."""
    files = [path / _FILE for path in (one, other)]
    if one.resolve() == other.resolve():
        return ""
    if all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return ""
    from allspan.protos.text.tokenizers.loading import load_tokenizer  # imports much, which ranks have no other use for

    first, second = load_tokenizer(one), load_tokenizer(other)
    control = first.special_ids | second.special_ids
    for token in range(min(first.vocab_size, second.vocab_size)):
        texts = first.codec.piece(token), second.codec.piece(token)
        if token not in control and texts[0] != texts[1] and all(texts):
            return f"token {token} is {_shown(texts[0])} and {_shown(texts[1])}"
    return ""


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", "backslashreplace"))
