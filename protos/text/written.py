"""Text that knows which of its characters a chat template wrote, so that a caller's text cannot pass for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

CUT = "\ue000cut\ue001"
"""A template's own mark between two stretches that are encoded each by itself; it is no text."""
_RUN = re.compile(b"\1+")
_REASONING_TAGS = re.compile(r"</?(?:think|thinking|thought|reasoning)>|\[/?THINK\]")
_PERCENT = re.compile(r"%(.)", re.DOTALL)


class Written(str):
    """A string with a mark for each character: the template's (or the server's) own, or not.

    It equals and hashes as the plain string, so that a template computes with it as with any other. Operations that
    are not here return plain strings, which nobody trusts: a mark can get lost, but never comes to a caller's text.
    """

    __slots__ = ("_mask",)
    _mask: bytes

    def __new__(cls, text: str = "", mask: bytes | None = None) -> Written:
        """`mask`: a byte 1 for each character that is the template's own, 0 for others (by default those of `text`)."""
        made = super().__new__(cls, text)
        made._mask = mask_of(text) if mask is None else mask
        return made

    @property
    def own(self) -> list[tuple[int, int]]:
        """The stretches that are the template's own, as (start, end)."""
        return [match.span() for match in _RUN.finditer(self._mask)]

    def __str__(self) -> str:
        return self

    def __getitem__(self, index: SupportsIndex | slice) -> Written:
        text = super().__getitem__(index)
        if isinstance(index, slice):
            return Written(text, self._mask[index])
        return Written(text, bytes((self._mask[index],)))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: str) -> Written:
        return Written(super().__add__(other), self._mask + mask_of(other))

    def __radd__(self, other: str) -> Written:
        return Written(str.__add__(other, self), mask_of(other) + self._mask)

    def __mul__(self, times: SupportsIndex) -> Written:
        return Written(super().__mul__(times), self._mask * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        text = super().__mod__(values)
        if not isinstance(values, tuple):
            values = (values,)
        if any(match[1] not in "s%" for match in _PERCENT.finditer(self)):
            return text
        parts: list[str] = []
        at, rest = 0, iter(values)
        for match in _PERCENT.finditer(self):
            parts += [self[at : match.start()], self[match.start() : match.start() + 1]]
            if match[1] == "s":
                parts[-1] = str(next(rest))
            at = match.end()
        made = joined([*parts, self[at:]])
        return made if made == text else text

    def join(self, parts: Iterable[str]) -> str:
        return joined(list(parts), self)

    def lstrip(self, chars: str | None = None) -> Written:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> Written:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None) -> Written:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> Written:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> Written:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(super().rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._found(super().splitlines(keepends), 0)

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(super().find(sep), sep, (self, Written(), Written()))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(super().rfind(sep), sep, (Written(), Written(), self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return super().replace(old, new, count)
        return joined(self.split(old, count), new)

    def upper(self) -> str:
        return self._recased(super().upper())

    def lower(self) -> str:
        return self._recased(super().lower())

    def capitalize(self) -> str:
        return self._recased(super().capitalize())

    def title(self) -> str:
        return self._recased(super().title())

    def _found(self, pieces: list[str], gap: int) -> list[str]:
        """The pieces of this text, which lie in it in this order, at least `gap` characters apart."""
        found: list[str] = []
        at = 0
        for piece in pieces:
            start = super().find(piece, at)
            found.append(self[start : start + len(piece)])
            at = start + len(piece) + gap
        return found

    def _parted(self, at: int, sep: str, otherwise: tuple[str, str, str]) -> tuple[str, str, str]:
        end = at + len(sep)
        return otherwise if at < 0 else (self[:at], self[at:end], self[end:])

    def _recased(self, text: str) -> str:
        return Written(text, self._mask) if len(text) == len(self) else text


def written(text: str) -> Written:
    """The text as the template's, or the server's, own."""
    return Written(text, b"\1" * len(text))


def with_own(text: str, own: Iterable[Iterable[int]]) -> Written:
    """The text with these stretches as its own."""
    mask = bytearray(len(text))
    for start, end in own:
        mask[start:end] = b"\1" * (end - start)
    return Written(text, bytes(mask))


def with_tags(text: str) -> Written:
    """An assistant's earlier answer, in which the tags of its reasoning are the model's own."""
    return with_own(text, (match.span() for match in _REASONING_TAGS.finditer(text)))


def stretches(text: Written) -> list[Written]:
    """The text between its template's CUTs, in order."""
    parts: list[Written] = []
    start = at = 0
    while (at := str.find(text, CUT, at)) >= 0:
        end = at + len(CUT)
        if text._mask[at:end] == b"\1" * len(CUT):
            parts.append(text[start:at])
            start = end
        at = end
    return [*parts, text[start:]]


def mask_of(text: str) -> bytes:
    """The marks of a text; none for a plain string."""
    return text._mask if isinstance(text, Written) else bytes(len(text))


def joined(parts: Iterable[str], separator: str = "") -> str:
    """The parts as one text, with their marks."""
    parts = list(parts)
    text = str.join(separator, parts)
    return Written(text, mask_of(separator).join(map(mask_of, parts)))
