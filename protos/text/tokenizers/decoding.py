"""The text that one token adds, from the `decoder` entry of a tokenizer.json.

A decoder is described there as steps over a list of tokens. Those of the supported families work on each token by
itself (the leading space of a text apart), which is what makes incremental detokenising exact and cheap.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import CheckpointError
from allspan.protos.text.tokenizers.byte_level import token_to_bytes

_SUPPORTED = ("ByteLevel", "Metaspace", "Sequence of Replace, ByteFallback, Fuse, Strip or ByteLevel")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class PieceDecoder:
    """Calls each step in turn until one gives bytes; the text itself if none does."""

    steps: tuple[Callable[[str], str | bytes], ...]
    strips_leading_space: bool = False
    before: bytes = b""
    """A text that precedes every token, those of the added vocabulary too."""

    def __call__(self, token: str) -> bytes:
        value: str | bytes = token
        for step in self.steps:
            if isinstance(value, bytes):
                break
            value = step(value)
        return self.before + (value if isinstance(value, bytes) else value.encode("utf-8", "replace"))


def piece_decoder(decoder: dict[str, Any] | None, path: Path) -> PieceDecoder:
    """Returns the decoder that tokenizer.json describes. Raises CheckpointError for one that is not supported."""
    if decoder is None:  # words, with spaces between them
        return PieceDecoder((), strips_leading_space=True, before=b" ")
    steps: list[Callable[[str], str | bytes]] = []
    strips = False
    entries: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    for entry in entries:
        kind = entry["type"]
        if kind == "ByteLevel":
            steps.append(token_to_bytes)
        elif kind == "ByteFallback":
            steps.append(_byte_fallback)
        elif kind == "Metaspace":
            steps.append(_replace(entry["replacement"], " "))
            strips = entry.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and "String" in entry["pattern"]:
            steps.append(_replace(entry["pattern"]["String"], entry["content"]))
        elif kind == "Strip" and (entry["content"], entry["start"], entry["stop"]) == (" ", 1, 0):
            strips = True
        elif kind != "Fuse":
            raise CheckpointError(
                f"{path}: decoder {kind!r} of tokenizer.json is not supported; supported are {', '.join(_SUPPORTED)}"
            )
    return PieceDecoder(tuple(steps), strips)


def _byte_fallback(token: str) -> str | bytes:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token


def _replace(old: str, new: str) -> Callable[[str], str]:
    return lambda token: token.replace(old, new)
