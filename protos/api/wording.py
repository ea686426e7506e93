"""Numbers in sentences for people."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 thread`, `2 threads`, `1,024 entries`; `plural` for nouns that do not only take an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
