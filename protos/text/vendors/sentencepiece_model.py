"""SentencePiece's `tokenizer.model`: a protocol buffer of pieces and of how text is prepared for them.

Layout: sentencepiece_model.proto of https://github.com/google/sentencepiece. Only the fields that change token ids are
read, each checked before anything is built of it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.limits import (
    MAX_CONTROL_TOKENS,
    MAX_TOKEN_BYTES,
    MAX_TOKENIZER_BYTES,
    MAX_VOCABULARY,
)
from allspan.protos.model_files.regular_file import read_regular
from allspan.protos.text.tokenizers.gguf_ends import TokenType

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BPE = 2
_MAX_VARINT_BYTES = 10
_TYPES = frozenset(map(int, TokenType))
_WAY_OUT = "convert it to a tokenizer.json with save_pretrained() of transformers' AutoTokenizer"


@dataclass(frozen=True)
class SentencePieceModel:
    """A BPE vocabulary: the text, the score and the type (`TokenType`) of each id, and what happens to a text first."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    adds_dummy_prefix: bool
    """A space is put before every text."""
    collapses_spaces: bool
    """Spaces at the ends of a text and all but one of several are left out."""

    def ids_of(self, *types: TokenType) -> list[int]:
        """Returns the ids of these types."""
        return [i for i, kind in enumerate(self.types) if kind in types]


def is_sentencepiece(data: bytes) -> bool:
    """Whether a `tokenizer.model` is SentencePiece's rather than a list of ranks: it begins with its first piece."""
    return data[:1] == b"\n"


def read_model(path: Path) -> SentencePieceModel:
    """The model in a file. Raises CheckpointError naming what is damaged, or not supported."""
    return parse_model(read_regular(path, MAX_TOKENIZER_BYTES), str(path))


def parse_model(data: bytes, source: str) -> SentencePieceModel:
    """The model that `data` is; `source` is what messages name. Raises CheckpointError."""
    pieces: list[tuple[str, float, int]] = []
    settings: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}}
    try:
        for field, value in _fields(data):
            if field == _PIECES:
                pieces.append(_piece(_message(value), len(pieces)))
                if len(pieces) > MAX_VOCABULARY:
                    raise _BadModel(f"it has more than {MAX_VOCABULARY} pieces, the limit")
            elif field in settings:
                settings[field] |= dict(_fields(_message(value)))
        _check_pieces(pieces)
    except _BadModel as error:
        raise CheckpointError(f"{source} cannot be read as a SentencePiece model: {error}") from error
    trainer, normalizer = settings[_TRAINER], settings[_NORMALIZER]
    for problem, found in {
        "a unigram, word or character model": trainer.get(3, 1) != _BPE,
        "a table that rewrites characters (precompiled_charsmap)": bool(normalizer.get(2, b"")),
        "spaces that are no part of its pieces (escape_whitespaces)": not normalizer.get(5, 1),
        "spaces at the ends of words (treat_whitespace_as_suffix)": bool(trainer.get(24, 0)),
        "unused pieces": any(kind == TokenType.UNUSED for _, _, kind in pieces),
    }.items():
        if found:
            raise CheckpointError(f"{source} has {problem}, which is not supported here; {_WAY_OUT}")
    texts, scores, types = zip(*pieces, strict=True)
    return SentencePieceModel(texts, scores, types, bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)))


def ids_of_texts(data: bytes, texts: Iterable[str], source: str) -> tuple[dict[str, int], int]:
    """The ids of these short pieces, and the number of all, without looking into the others. Raises CheckpointError."""
    beginnings = {b"\n" + bytes([len(text.encode())]) + text.encode(): text for text in texts}
    sizes = set(map(len, beginnings))
    found: dict[str, int] = {}
    count = 0
    try:
        for field, value in _fields(data):
            if field == _PIECES and isinstance(value, bytes):
                found |= {beginnings[value[:size]]: count for size in sizes if value[:size] in beginnings}
                count += 1
    except _BadModel as error:
        raise CheckpointError(f"{source} cannot be read as a SentencePiece model: {error}") from error
    return found, count


class _BadModel(Exception):
    """What is wrong with the file."""


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of one message in order: numbers of variable length as integers, all others as bytes."""
    at = 0
    while at < len(data):
        key, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield field, value
            continue
        if kind == _BYTES:
            size, at = (data[at], at + 1) if at < len(data) and data[at] < 0x80 else _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise _BadModel(f"the field before byte {at} has the unknown wire type {kind}")
        if size > len(data) - at:
            raise _BadModel(f"a field has {size} bytes where {len(data) - at} are left")
        yield field, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        if at + i >= len(data):
            raise _BadModel("it ends inside a number")
        byte = data[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise _BadModel(f"the number at byte {at} has more than {_MAX_VARINT_BYTES} bytes")


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise _BadModel("it has a number where a message must be")
    return value


def _piece(data: bytes, token_id: int) -> tuple[str, float, int]:
    """The text, the score and the type of a piece."""
    values = dict(_fields(data))
    text, score, kind = values.get(1, b""), values.get(2, bytes(4)), values.get(3, int(TokenType.NORMAL))
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4 or not isinstance(kind, int):
        raise _BadModel(f"piece {token_id} has a field of the wrong type")
    if not 1 <= len(text) <= MAX_TOKEN_BYTES:
        raise _BadModel(f"piece {token_id} has {len(text)} bytes, must have 1 to {MAX_TOKEN_BYTES}")
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise _BadModel(f"piece {token_id} is not UTF-8") from error
    number: float = struct.unpack("<f", score)[0]
    if not math.isfinite(number):
        raise _BadModel(f"piece {token_id} has the score {number}, must be finite")
    if kind not in _TYPES:
        raise _BadModel(f"piece {token_id} has the type {kind}, must be one of {sorted(_TYPES)}")
    return decoded, number, kind


def _check_pieces(pieces: list[tuple[str, float, int]]) -> None:
    if not pieces:
        raise _BadModel("it has no pieces")
    seen: set[str] = set()
    for i, (text, _, kind) in enumerate(pieces):
        if text in seen:
            raise _BadModel(f"piece {i} has the same text as another one: {text[:64]!r}")
        seen.add(text)
        if kind == TokenType.BYTE and not (len(text) == 6 and _is_byte(text)):
            raise _BadModel(f"piece {i} is a byte's, but is written {text[:64]!r} rather than like '<0x0A>'")
    looked_for = sum(kind in (TokenType.CONTROL, TokenType.USER_DEFINED) for _, _, kind in pieces)
    if looked_for > MAX_CONTROL_TOKENS:
        raise _BadModel(f"it has {looked_for} control and user-defined pieces, at most {MAX_CONTROL_TOKENS}")
    unknown = sum(kind == TokenType.UNKNOWN for _, _, kind in pieces)
    if unknown != 1:
        raise _BadModel(f"it has {unknown} pieces for unknown text, must have one")
    num_bytes = sum(kind == TokenType.BYTE for _, _, kind in pieces)
    if num_bytes not in (0, 256):
        raise _BadModel(f"it has pieces for {num_bytes} of the 256 bytes, must have all or none")


def _is_byte(text: str) -> bool:
    return text[:3] == "<0x" and text[5] == ">" and all(digit in "0123456789ABCDEF" for digit in text[3:5])
