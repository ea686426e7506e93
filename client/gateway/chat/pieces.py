"""The pieces of an assistant's message, as they come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jiter

from allspan.client.gateway.chat.json_scan import SPACE

MAX_HELD_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool is called; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: part of a JSON object's text."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


@dataclass
class Call:
    """A whole call; `arguments` is the text of a JSON object, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """The pieces put together. None where there was none of a kind."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        match piece:
            case Content(text):
                self.content = (self.content or "") + text
            case Reasoning(text):
                self.reasoning = (self.reasoning or "") + text
            case CallStart(_, name=name, id=call_id):
                self.calls.append(Call(call_id, name))
            case CallArguments(index, text):
                self.calls[index].arguments += text


def arguments_of(text: str) -> dict[str, Any]:
    """Returns a call's arguments as an object; of text that breaks off, what there is, and {} for what is no object."""
    try:
        value = jiter.from_json(text.encode(), partial_mode="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def end_of(text: str, trailing: str = SPACE) -> int:
    """Returns the length of the text without the `trailing` characters at its end, of which at most MAX_HELD_CHARS are
    taken off: a reader of pieces holds so many back, and looks at them again with each piece."""
    return max(len(text.rstrip(trailing)), len(text) - MAX_HELD_CHARS)


def overlap(text: str, mark: str) -> int:
    """Returns the length of the text's longest end that begins the mark, but is not all of it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
