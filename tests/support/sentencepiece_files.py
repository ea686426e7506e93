"""SentencePiece `tokenizer.model` files, written field by field: their library is no dependency."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
START = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def piece(text: str | bytes, score: float = 0.0, kind: int = NORMAL) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return message(1, message(1, data) + varint(2 << 3 | 5) + struct.pack("<f", score) + number(3, kind))


def model(
    pieces: Iterable[tuple[str, float, int]],
    dummy_prefix: bool = True,
    collapse: bool = False,
    model_type: int = 2,
    trainer: bytes = b"",
    normalizer: bytes = b"",
) -> bytes:
    """A whole file. `trainer` and `normalizer`: further fields of those messages."""
    flags = number(3, dummy_prefix) + number(4, collapse) + number(5, 1)
    settings = message(2, number(3, model_type) + number(35, 1) + trainer) + message(3, flags + normalizer)
    return b"".join(piece(*each) for each in pieces) + settings


def merged(words: Sequence[str]) -> list[tuple[str, float, int]]:
    """The pieces of a tiny vocabulary with all bytes: every beginning of the words, the shorter and earlier first."""
    texts = dict.fromkeys(word[:size] for size in range(1, 40) for word in words if size <= len(word))
    return [*START, *BYTES, *((text, -float(i), NORMAL) for i, text in enumerate(texts))]


def variants(words: Sequence[str]) -> dict[str, bytes]:
    """Tiny models with all settings that change ids: dummy prefix, collapsed spaces, defined pieces, no bytes."""
    texts = ("\n", "ab", "日本", "本語x", "▁▁a", *(f"<reserved_{i}>" for i in range(110)))
    pieces = [*merged(words), *((text, 0.0, USER_DEFINED) for text in texts)]
    without = [each for each in merged(words) if each[2] != BYTE]
    without += [(letter, -90.0 - i, NORMAL) for i, letter in enumerate("bcxyzBr123'.:/")]
    flags = message(3, number(3, 1) + number(4, 1) + number(5, 1))
    return {
        "prefix": model(pieces, True, False),
        "plain": model(pieces, False, False),
        "prefix collapsed": model(pieces, True, True),
        "collapsed": model(pieces, False, True),
        "no bytes": b"".join(piece(*each) for each in without) + message(2, number(3, 2)) + flags,
    }
