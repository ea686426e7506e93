"""Small GGUF files, written for one test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

# What byte-level BPE writes for a space, and SentencePiece.
G, SPACE = "Ġ", "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def write_gguf(path: Path, values: Mapping[str, Any]) -> Path:
    """Metadata only. Lists of strings, integers or floats become arrays; keys as in the file."""
    writer = GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_alphabet() -> list[str]:
    """One character a byte value, in the order of the values: GPT-2's table, spelled out independently."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def byte_level_gguf(
    path: Path, merges: Sequence[str] = (), special: Mapping[str, int] | None = None, **metadata: Any
) -> Path:
    """Byte-level BPE: ids 0..255 are the bytes, then what the merges make, then special texts with their types."""
    special = special or {}
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), *special]
    types = [NORMAL] * (256 + len(merges)) + list(special.values())
    values: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types}
    if merges:
        values["merges"] = list(merges)
    return write_gguf(path, _full_names(values) | _full_names(metadata))


def sentencepiece_gguf(
    path: Path, pieces: Mapping[str, float], special: Mapping[str, int] | None = None, **metadata: Any
) -> Path:
    """<unk> <s> </s>, the 256 bytes, then pieces with their scores, then special texts with their token types."""
    special = special or {}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *special]
    types = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * len(pieces)), *special.values()]
    scores = [0.0] * 259 + list(pieces.values()) + [0.0] * len(special)
    values: dict[str, Any] = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    values |= {"bos_token_id": 1, "eos_token_id": 2}
    return write_gguf(path, _full_names(values) | _full_names(metadata))


def _full_names(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in values.items()}
