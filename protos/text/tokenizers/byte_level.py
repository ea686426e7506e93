"""The alphabet of byte-level BPE: every byte is written as one printable character (GPT-2's table)."""

from __future__ import annotations


def _table() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _table()


def token_to_bytes(text: str) -> bytes:
    """The bytes that a token stands for; one that is not written in the alphabet stands for its own text."""
    try:
        return bytes(BYTES[character] for character in text)
    except KeyError:
        return text.encode()
