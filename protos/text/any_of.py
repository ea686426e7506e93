"""Finding any of many texts in another one, however many there are and however nearly they occur in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix

STRETCH_CHARS = 1 << 14
"""Characters that are searched at once: the library lets no other thread run meanwhile."""
MAX_DEPTH = 64
"""Groups within groups of the expression, which is compiled recursively."""


class AnyOf:
    """Texts to find; of several that begin at one place the longest counts. Empty ones are left out."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if text})
        self._any = re.compile(_expression(known, 0) if known else r"(?!)")
        longest = max(map(len, known), default=1)
        self._overlap = longest - 1
        self._stretch = max(STRETCH_CHARS, longest)

    def spans(self, text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Where they are in this stretch of a text, as (start, end), from left to right and without overlaps."""
        end = len(text) if end is None else end
        at = start
        while at < end:
            stop = min(at + self._stretch, end)
            for match in self._any.finditer(text, at, min(stop + self._overlap, end)):
                if match.start() >= stop:  # a longer one might end beyond what is searched now
                    break
                yield match.span()
                at = match.end()
            at = max(at, stop)

    def are_in(self, text: str) -> bool:
        """Whether one of them is in the text."""
        return next(self.spans(text), None) is not None


def _expression(texts: list[str], depth: int) -> str:
    """A regular expression of sorted, different texts. What they begin with is tried once, not once for each of them:
    an alternation of all costs their number at every place where one may begin."""
    shared = commonprefix([texts[0], texts[-1]])  # noqa: RUF071 - letter by letter is what is meant
    rests = [text[len(shared) :] for text in texts]
    if len(rests) == 1:
        return re.escape(shared)
    if depth < MAX_DEPTH:
        groups = groupby(filter(None, rests), itemgetter(0))
        branches = [_expression(list(group), depth + 1) for _, group in groups]
    else:
        branches = [re.escape(rest) for rest in sorted(filter(None, rests), key=len, reverse=True)]
    if not rests[0]:
        branches.append("")  # after all longer ones
    return f"{re.escape(shared)}(?:{'|'.join(branches)})"
