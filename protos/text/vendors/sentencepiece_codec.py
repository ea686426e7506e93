"""Text to the ids of a SentencePiece BPE model and back, id for id as SentencePiece's own library has it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from allspan.protos.text.any_of import AnyOf
from allspan.protos.text.tokenizers.control import BREAK, FRAME, ControlTexts, is_control_text
from allspan.protos.text.tokenizers.gguf_ends import TokenType
from allspan.protos.text.tokenizers.spm import SPACE, SpmModel
from allspan.protos.text.vendors.sentencepiece_model import SentencePieceModel

_SPACES = re.compile(" {2,}")


class SentencePieceCodec:
    """A SentencePiece model, and special tokens that its model's own code appends to it (`appended`, text to id).

    `roles`: texts of pieces that speak for a role in the model's chat format, whatever type the file gives them.
    """

    def __init__(self, model: SentencePieceModel, appended: Mapping[str, int], roles: frozenset[str]) -> None:
        self._model = model
        texts = {text: i for i, text in enumerate(model.pieces)}
        control = {model.pieces[i]: i for i in model.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)}
        defined = {model.pieces[i]: i for i in model.ids_of(TokenType.USER_DEFINED)}
        self._always = _Finder(defined)
        steering = {text: i for text, i in defined.items() if is_role_text(text)}
        steering |= control | {text: texts[text] for text in roles if text in texts} | dict(appended)
        self._parsed = _Finder(steering)
        framed = {f"{FRAME}{text}{FRAME}": i for text, i in steering.items()}
        self._framed = _Finder({**framed, BREAK: -1})
        self._words = _Finder({text: i for text, i in defined.items() if text not in steering})
        (unknown,) = model.ids_of(TokenType.UNKNOWN)
        self.control = ControlTexts(steering, (unknown,))
        byte_ids = {int(model.pieces[i][3:5], 16): i for i in model.ids_of(TokenType.BYTE)}
        merged = [
            text if kind == TokenType.NORMAL and text not in steering else ""
            for text, kind in zip(model.pieces, model.types, strict=True)
        ]
        self._unknown = unknown
        self._spm = SpmModel(merged, model.scores, byte_ids, unknown)
        self._pieces = {i: _piece(text, model.types[i]) for text, i in texts.items()}
        self._pieces |= {i: text.encode() for text, i in appended.items()}
        self.vocab_size = max(self._pieces) + 1

    def encode(self, text: str, parse_special: bool) -> list[int]:
        if not parse_special:
            return self._text(text, self._always)
        ids: list[int] = []
        for part in self._parsed.cut(text):
            ids += [part] if isinstance(part, int) else self._text(part, self._always)
        return ids

    def encode_framed(self, text: str) -> list[int]:
        ids: list[int] = []
        is_broken = False
        for part in self._framed.cut(text):
            if isinstance(part, str):
                ids += self._text(part, self._words, goes_on=is_broken)
            elif part >= 0:
                ids.append(part)
            is_broken = part == -1
        return ids

    def piece(self, token_id: int) -> bytes:
        return self._pieces.get(token_id, b"")

    def _text(self, text: str, defined: _Finder, goes_on: bool = False) -> list[int]:
        """The ids of a text without control tokens; `goes_on`: it is not the text's beginning."""
        if self._model.collapses_spaces:
            text = _SPACES.sub(" ", text if goes_on else text.strip(" "))
        if not text:
            return []
        if self._model.adds_dummy_prefix and not goes_on:
            text = " " + text
        text = text.replace(" ", SPACE)
        if self._model.collapses_spaces:
            text = text.rstrip(SPACE)  # so that one which the caller wrote as ▁ goes as well
        ids: list[int] = []
        for part in defined.cut(text):
            ids += [part] if isinstance(part, int) else self._spm.encode(part)
        # Of unknown characters that follow each other SentencePiece makes one token.
        return [i for at, i in enumerate(ids) if i != self._unknown or at == 0 or ids[at - 1] != i]


class _Finder:
    """Texts with their ids; of several that begin at one place the longest counts."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._any = AnyOf(ids)

    def cut(self, text: str) -> list[str | int]:
        """The text in order: stretches between what is found (never empty), and the ids."""
        parts: list[str | int] = []
        at = 0
        for start, end in self._any.spans(text):
            if start > at:
                parts.append(text[at:start])
            parts.append(self._ids[text[start:end]])
            at = end
        if at < len(text):
            parts.append(text[at:])
        return parts


def is_role_text(text: str) -> bool:
    """Whether a piece that a user's text may spell could steer the model (`<reserved_106>`): signs around a name."""
    return is_control_text(text) and any(character.isalnum() for character in text)


def _piece(text: str, kind: int) -> bytes:
    if kind == TokenType.BYTE:
        return bytes([int(text[3:5], 16)])
    if kind in (TokenType.NORMAL, TokenType.USER_DEFINED):
        return text.replace(SPACE, " ").encode()
    return text.encode()
