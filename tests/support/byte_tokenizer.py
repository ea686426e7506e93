"""Tokenizers whose token ids are bytes: one built in memory, and the same as a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allspan.protos.text import Tokenizer
from allspan.protos.text.tokenizers.control import BREAK, ControlTexts


class ByteCodec:
    """Id 0 to 255: that byte."""

    vocab_size = 256
    control = ControlTexts({})

    def encode(self, text: str, parse_special: bool) -> list[int]:
        return list(text.encode())

    def encode_framed(self, text: str) -> list[int]:
        return list(text.replace(BREAK, "").encode())

    def piece(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


def byte_tokenizer(special_ids: frozenset[int] = frozenset()) -> Tokenizer:
    return Tokenizer(codec=ByteCodec(), name="bytes", special_ids=special_ids)


def write_byte_tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer.json: byte-level BPE without merges, so that every byte is a token."""
    folder.mkdir(parents=True, exist_ok=True)
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256}), encoding="utf-8")
    return folder
