"""Cutting the texts of special tokens out of a prompt, the way llama.cpp does: the longest texts first, everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from allspan.protos.text.any_of import AnyOf
from allspan.protos.text.tokenizers.control import BREAK, FRAME, ControlTexts, is_control_text

NO_TOKEN = -1


class SpecialTokens:
    """The special tokens of a vocabulary. `control` texts count only where the caller allows special tokens in its
    text; `defined` ones always do."""

    def __init__(self, control: Mapping[str, int], defined: Mapping[str, int], unknown: Iterable[int] = ()) -> None:
        """`unknown`: ids that stand for text without a token as well."""
        self._all = _Cutter({**control, **defined})
        self._defined = _Cutter(defined)
        steering = {**control, **{text: i for text, i in defined.items() if is_control_text(text)}}
        self.control = ControlTexts(steering, unknown)
        framed = {f"{FRAME}{text}{FRAME}": i for text, i in steering.items()}
        words = {text: i for text, i in defined.items() if text not in steering}
        self._framed = _Cutter({**framed, **words, BREAK: NO_TOKEN})

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """The text in order, as ids of special tokens and stretches of other text (never empty)."""
        return (self._all if parse_special else self._defined).split(text)

    def split_framed(self, text: str) -> list[str | int]:
        """The same, for a text whose special tokens are framed; NO_TOKEN for a BREAK."""
        return self._framed.split(text)


class _Cutter:
    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        # Longest in UTF-8 bytes first; among equals the first id.
        self._texts = sorted(self._ids, key=lambda text: (-len(text.encode()), self._ids[text]))
        self._any = AnyOf(self._texts)

    def split(self, text: str) -> list[str | int]:
        parts: list[str | int] = [text] if text else []
        if not self._any.are_in(text):
            return parts
        for special in self._texts:
            if special in text:
                parts = [piece for part in parts for piece in self._cut(part, special)]
        return parts

    def _cut(self, part: str | int, special: str) -> list[str | int]:
        if isinstance(part, int) or special not in part:
            return [part]
        pieces: list[str | int] = []
        for stretch in part.split(special):
            pieces += [stretch, self._ids[special]] if stretch else [self._ids[special]]
        return pieces[:-1]
