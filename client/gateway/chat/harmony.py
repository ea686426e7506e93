"""gpt-oss's messages (OpenAI's "harmony" format): each has a header with its channel and its recipient, then a body.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

What goes to the channel `analysis` is reasoning, to a function a call, everything else the answer. The recipient may
stand before the channel, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from allspan.client.gateway.chat.calls import new_call_id
from allspan.client.gateway.chat.json_scan import SPACE
from allspan.client.gateway.chat.pieces import (
    MAX_HELD_CHARS,
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    overlap,
)
from allspan.client.gateway.chat.tools import Function

FINAL = "<|channel|>final<|message|>"
"""What an answer without reasoning begins with."""
_BODY, _ENDS = "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_BEGINNINGS = ("<|start|>", "<|channel|>", "<|message|>", "to=")
_CHANNEL = re.compile(r"<\|channel\|>[ \n]*([\w-]*)")
_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")
_OTHER_TOOL = re.compile(r"\bto=(?!user\b)")
_THOUGHT = '<|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant"'
_PREAMBLE = '<|channel|> "commentary" <|message|> TEXT <|end|> <|start|> "assistant"'


class HarmonyReader:
    """`push` text in order, then `finish`; both return the pieces that are certain by then. Text without any header is
    the answer."""

    def __init__(self, opened: str = "", may_call: bool = False, separates: bool = True) -> None:
        """`opened`: the header that the prompt ended with, if it did. Without `may_call` bodies of calls are the
        answer, and unless it `separates` reasoning, that is, too."""
        self._may_call = may_call
        self._thought: Callable[[str], Piece] = Reasoning if separates else Content
        self._buffer = opened
        self._state: Callable[[], bool] = self._at_start
        self._make: Callable[[str], Piece] = Content
        self._calls = 0
        self._is_later = False
        """Whether a message is over, so that space does not count before the next one."""
        self._is_empty = True
        """Whether the body at hand has no text yet."""
        self._told: set[type] = set()
        """Kinds of pieces that were told; a line break is between two messages of one kind."""
        self._final = False
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._read()

    def finish(self) -> list[Piece]:
        self._final = True
        return self._read()

    def _read(self) -> list[Piece]:
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _at_start(self) -> bool:
        """Reads the beginning of a message: a header, or text without one."""
        text = self._buffer.lstrip(SPACE)
        if text.startswith(_BEGINNINGS):
            self._state = self._in_header
            return True
        is_short = len(self._buffer) - len(text) <= MAX_HELD_CHARS
        if is_short and not self._final and any(each.startswith(text) for each in _BEGINNINGS):
            return False
        if self._is_later:
            self._buffer = text
        self._open(Content)
        return bool(self._buffer)

    def _in_header(self) -> bool:
        at = self._buffer.find(_BODY)
        is_long = len(self._buffer) > MAX_HELD_CHARS and not 0 <= at <= MAX_HELD_CHARS
        if is_long or (at < 0 and self._final and "<|" not in self._buffer):
            text = self._buffer.lstrip(SPACE)  # without its mark, which would begin a header again
            mark = next((each for each in _ENDS if text.startswith(each)), "")
            self._buffer = text.removeprefix(mark) if mark else self._buffer
            self._open(Content)
            return True
        if at < 0:  # what breaks off here is no text
            return False
        header, self._buffer = self._buffer[:at], self._buffer[at + len(_BODY) :]
        channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
        if function and self._may_call:
            self._call(function[1])
        elif not function and (_OTHER_TOOL.search(header) or (channel and channel[1] == "analysis")):
            self._open(self._thought)
        else:
            self._open(Content)
        return True

    def _in_body(self) -> bool:
        found = [(at, mark) for mark in _ENDS if (at := self._buffer.find(mark)) >= 0]
        if not found:
            keep = 0 if self._final else max(overlap(self._buffer, mark) for mark in _ENDS)
            self._tell(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            if self._final:
                self._close()
            return False
        at, mark = min(found)
        self._tell(self._buffer[:at])
        self._close()
        is_header = mark in ("<|start|>", "<|channel|>")
        self._buffer = self._buffer[at if is_header else at + len(mark) :]
        self._state, self._is_later = self._in_header if is_header else self._at_start, True
        return True

    def _call(self, name: str) -> None:
        index, self._calls = self._calls, self._calls + 1
        self._pieces.append(CallStart(index, new_call_id(), name))
        self._open(lambda text: CallArguments(index, text))

    def _open(self, make: Callable[[str], Piece]) -> None:
        self._make, self._is_empty, self._state = make, True, self._in_body

    def _tell(self, text: str) -> None:
        if not text:
            return
        piece = self._make(text)
        if self._is_empty and not isinstance(piece, CallArguments) and type(piece) in self._told:
            self._pieces.append(self._make("\n"))
        self._told.add(type(piece))
        self._is_empty = False
        self._pieces.append(piece)

    def _close(self) -> None:
        """The body is over; a call without arguments has an empty object of them."""
        if self._is_empty and isinstance(empty := self._make("{}"), CallArguments):
            self._pieces.append(empty)
        self._is_empty = True


def calls_rules(functions: Sequence[Function], required: bool, answer: str = "") -> str:
    """The rules (Lark) of an output with one call at most, thoughts and notes before it: a call, or, unless it is
    `required`, text; `answer` is the rule of what text is then."""
    rules = [
        "start: before* call" + ("" if required else " | before* final"),
        f"before: {_THOUGHT} | {_PREAMBLE}",
        "TEXT: /(.|\\n)*/",
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    if not required:
        rules += [f'final: <|channel|> "final" <|message|> {"answer" if answer else "TEXT"}']
        rules += [f"answer: {answer}"] if answer else []
    for i, function in enumerate(functions):
        head = json.dumps(f"commentary to=functions.{function.name} ")
        rules.append(f'call_{i}: <|channel|> {head} <|constrain|> "json" <|message|> arguments_{i}')
        rules.append(f"arguments_{i}: %json {json.dumps(function.schema)}")
    return "\n".join(rules) + "\n"
