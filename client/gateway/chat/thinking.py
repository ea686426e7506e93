"""Separates a model's reasoning from its answer in text that arrives in pieces."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from allspan.client.gateway.chat.formats import HARMONY, MARKS, has_channels
from allspan.client.gateway.chat.json_scan import SPACE
from allspan.client.gateway.chat.pieces import MAX_HELD_CHARS, end_of, overlap


@dataclass(frozen=True)
class Tags:
    """The tags around the reasoning, at the beginning of an output."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    from_start: bool = False
    """The model thinks from its first token, whether or not it writes the opening tag."""
    marks: tuple[str, ...] = ()
    """The marks of messages with channels, which `HarmonyReader` reads."""


_THINK = ("<think>", "</think>")

TAGS: Mapping[str, Tags] = {
    row.name: row
    for row in (
        Tags("qwen3", (_THINK,)),
        Tags("deepseek_r1", (_THINK,), from_start=True),
        Tags(HARMONY, (("<|channel|>analysis<|message|>", "<|end|>"),), marks=MARKS),
        Tags(
            "generic",
            (
                _THINK,
                ("<thinking>", "</thinking>"),
                ("<thought>", "</thought>"),
                ("<reasoning>", "</reasoning>"),
                ("[THINK]", "[/THINK]"),
            ),
        ),
    )
}
"""The reasoning tags by the name that `--reasoning-parser` takes."""


def tags_of_template(source: str) -> Tags | None:
    """Returns the tags that a chat template's own text contains."""
    if has_channels(source):
        return TAGS[HARMONY]
    named = [pair for pair in TAGS["generic"].pairs if pair[0] in source or pair[1] in source]
    return Tags("auto", tuple(named)) if named else None


class ThinkReader:
    """The reader of reasoning: `push` text in order, then `finish`; both return (reasoning, answer), as far as it is
    certain.

    Space around the tags belongs to neither. Tags further on in the answer are the answer's own text.
    """

    def __init__(self, tags: Tags, opened: str = "") -> None:
        """`opened`: the tag that the prompt ended with, if it did."""
        self._pairs = tags.pairs
        self._close = ""
        self._buffer = ""
        self._state = self._before
        self.has_thought = False
        if opened or tags.from_start:
            self._close = dict(tags.pairs).get(opened, tags.pairs[0][1])
        self._thinking: list[str] = []
        self._answer: list[str] = []
        self._final = False

    @property
    def is_over(self) -> bool:
        """True once all further text is the answer."""
        return self._state in (self._in_answer, self._in_answer_space)

    def push(self, text: str) -> tuple[str, str]:
        self._buffer += text
        return self._read()

    def finish(self) -> tuple[str, str]:
        self._final = True
        return self._read()

    def _read(self) -> tuple[str, str]:
        while self._state():
            pass
        found = "".join(self._thinking), "".join(self._answer)
        self._thinking.clear()
        self._answer.clear()
        return found

    def _before(self) -> bool:
        """Reads the beginning of the output, which may be a tag."""
        text = self._buffer.lstrip(SPACE)
        if len(self._buffer) - len(text) <= MAX_HELD_CHARS:
            for opening, closing in self._pairs:
                if text.startswith(opening):
                    return self._go(self._in_thought_space, text[len(opening) :], closing)
            if not self._final and any(opening.startswith(text) for opening, _ in self._pairs):
                return False
        if self._close:
            return self._go(self._in_thought_space, text, self._close)
        return self._go(self._in_answer, self._buffer, "")

    def _in_thought_space(self) -> bool:
        return self._after_space(self._in_thought)

    def _in_thought(self) -> bool:
        at = self._buffer.find(self._close)
        if at >= 0:
            self._thinking.append(self._buffer[: end_of(self._buffer[:at])])
            return self._go(self._in_answer_space, self._buffer[at + len(self._close) :], "")
        keep = 0 if self._final else overlap(self._buffer, self._close)
        sure = self._buffer[: len(self._buffer) - keep]
        sure = sure if self._final else sure[: end_of(sure)]
        self._thinking.append(sure)
        self._buffer = self._buffer[len(sure) :]
        return False

    def _in_answer_space(self) -> bool:
        return self._after_space(self._in_answer)

    def _in_answer(self) -> bool:
        self._answer.append(self._buffer)
        self._buffer = ""
        return False

    def _after_space(self, state: Callable[[], bool]) -> bool:
        self._buffer = self._buffer.lstrip(SPACE)
        return bool(self._buffer) and self._go(state, self._buffer, self._close)

    def _go(self, state: Callable[[], bool], buffer: str, close: str) -> bool:
        self._state, self._buffer, self._close = state, buffer, close
        self.has_thought = self.has_thought or bool(close)
        return True


class ThoughtCounter:
    """Counts the tokens of an output that are reasoning, its tags among them."""

    def __init__(self, tags: Tags | None, opened: str, piece: Callable[[int], bytes]) -> None:
        known = opened if tags and opened in dict(tags.pairs) else ""
        self._reader = ThinkReader(tags, known) if tags else None
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._piece = piece
        self._pushed = 0

    @property
    def count(self) -> int:
        return self._pushed if self._reader is not None and self._reader.has_thought else 0

    def push(self, token_ids: Iterable[int]) -> None:
        if self._reader is None:
            return
        for token_id in token_ids:
            if self._reader.is_over:
                return
            self._reader.push(self._decoder.decode(self._piece(token_id)))
            self._pushed += 1
