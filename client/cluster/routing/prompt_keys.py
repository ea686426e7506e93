"""PromptKeys: the keys of a prompt's pages, made as far as they are read."""

from __future__ import annotations

from collections.abc import Iterator


class PromptKeys:
    """Can be read several times; each key is made once, when it is first read."""

    def __init__(self, source: Iterator[int]) -> None:
        self._source = source
        self._made: list[int] = []

    def __iter__(self) -> Iterator[int]:
        made = self._made
        yield from made
        for key in self._source:
            made.append(key)
            yield key

    def all(self) -> list[int]:
        """Every key."""
        self._made.extend(self._source)
        return self._made
