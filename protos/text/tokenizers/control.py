"""Control tokens read only where a chat template wrote them: elsewhere their texts are text like any other.

Most prompts spell no control token but the template's: they are tokenised as they are. In others the template's own are
framed by a text that nobody can guess, and a vocabulary whose control tokens are spelled with that frame reads them
(`Codec.encode_framed`): everything else, spaces around special tokens included, is as the tokenizer has it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.text.any_of import AnyOf
from allspan.protos.text.written import Written, stretches

FRAME = f"<{secrets.token_hex(16)}>"
BREAK = f"<{secrets.token_hex(16)}>"
"""Stands between two letters that no token may join; it is no token itself."""


class ControlTexts:
    """The texts of a vocabulary's control tokens. `unknown`: ids that stand for text without a token as well."""

    def __init__(self, ids: Mapping[str, int], unknown: Iterable[int] = ()) -> None:
        self.ids = {text: token_id for text, token_id in ids.items() if text}
        self._any = AnyOf(self.ids)
        self._steering = frozenset(self.ids.values()) - set(unknown)

    def find(self, text: str, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """Where the texts are in this stretch of a text, as (start, end)."""
        return list(self._any.spans(text, start, end))

    def are_among(self, ids: Sequence[int], allowed: Iterable[int]) -> bool:
        """Whether all control tokens among the ids are allowed ones, in their order."""
        left = iter(allowed)
        return all(token_id in left for token_id in ids if token_id in self._steering)


class FramedCodec(Protocol):
    """A vocabulary that knows its control tokens."""

    @property
    def control(self) -> ControlTexts:
        """The texts of the control tokens."""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """See `Codec`."""

    def encode_framed(self, text: str) -> list[int]:
        """Returns token ids; a control token's text becomes its id only between two FRAMEs. BREAKs are left out."""


def is_control_text(text: str) -> bool:
    """Whether an added token steers the model (`<tool_call>`) rather than being text of its own (a run of spaces, a
    word)."""
    return any(not (character.isalnum() or character.isspace() or character == "▁") for character in text)


def written_ids(codec: FramedCodec, text: Written) -> list[int]:
    """The ids of a text whose control tokens count only where they are wholly its template's own, and which is encoded
    anew behind each CUT. InvalidRequest when the vocabulary cannot spell the rest of it."""
    return [token_id for stretch in stretches(text) for token_id in _stretch_ids(codec, stretch)]


def _stretch_ids(codec: FramedCodec, text: Written) -> list[int]:
    control = codec.control
    meant = [span for start, end in text.own for span in control.find(text, start, end)]
    allowed = [control.ids[str.__getitem__(text, slice(*span))] for span in meant]
    if control.find(text) == meant:
        ids = codec.encode(str.__str__(text), True) if text else []
        if control.are_among(ids, allowed):
            return ids
    for separator in ("", BREAK):  # as it is read; else letter by letter
        ids = codec.encode_framed(_framed(str.__str__(text), meant, separator))
        if control.are_among(ids, allowed):
            return ids
    raise InvalidRequest(
        "the prompt has text that this model's tokenizer reads as a control token even letter by letter", "prompt"
    )


def _framed(text: str, meant: Iterable[tuple[int, int]], separator: str) -> str:
    parts: list[str] = []
    at = 0
    for start, end in meant:
        parts += [_spelled(text[at:start], separator), FRAME, text[start:end], FRAME]
        at = end
    return "".join([*parts, _spelled(text[at:], separator)])


def _spelled(text: str, separator: str) -> str:
    return separator.join(text) if separator else text
