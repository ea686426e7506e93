"""Turns an output's text, as it comes, into the pieces of a message: reasoning, then text and tool calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from allspan.client.gateway.chat.calls import CallReader
from allspan.client.gateway.chat.formats import CallFormat
from allspan.client.gateway.chat.harmony import HarmonyReader
from allspan.client.gateway.chat.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from allspan.client.gateway.chat.thinking import Tags, ThinkReader


@dataclass(frozen=True)
class Reading:
    """The settings for reading the outputs of one request. Text alone unless something is said."""

    tags: Tags | None = None
    opened: str = ""
    """The tag of `tags` that the prompt ends with, if it does."""
    tell_reasoning: bool = True
    separates: bool = True
    """False: reasoning in a channel of its own is part of the answer."""
    form: CallFormat | None = None
    names: Collection[str] = ()
    """The names of the tools that may be called."""
    parallel: bool = True
    """False: of several calls the first counts."""
    lead: str = ""
    """What may stand before the answer and is no part of it, as far as it is there."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of messages with channels; none where outputs have none."""
        return (self.tags.marks if self.tags else ()) or (self.form.marks if self.form else ())


class MessageReader:
    """`push` each text in order, then `finish`; the pieces are the same for every split of the whole."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._lead = reading.lead
        has_thoughts = reading.tags is not None and reading.separates
        reader = HarmonyReader(reading.opened, reading.form is not None, has_thoughts)
        self._channels = reader if reading.marks else None
        self._think = ThinkReader(reading.tags, reading.opened) if reading.tags else None
        self._calls = CallReader(reading.form, reading.names) if reading.form else None

    def push(self, text: str) -> list[Piece]:
        text = self._led(text) if self._lead else text
        if not text:
            return []
        if self._channels is not None:
            return self._of_channels(self._channels.push(text))
        thinking, answer = ("", text) if self._think is None else self._think.push(text)
        return self._thought(thinking) + self._answered(answer)

    def finish(self) -> list[Piece]:
        if self._channels is not None:
            return self._of_channels(self._channels.finish())
        thinking, answer = ("", "") if self._think is None else self._think.finish()
        rest = self._answered(answer)
        return self._thought(thinking) + rest + (self._sieve(self._calls.finish()) if self._calls else [])

    def _of_channels(self, pieces: list[Piece]) -> list[Piece]:
        tells = self._reading.tell_reasoning
        return self._sieve([piece for piece in pieces if tells or not isinstance(piece, Reasoning)])

    def _led(self, text: str) -> str:
        """The text without what there is of the lead."""
        same = 0
        while same < min(len(text), len(self._lead)) and text[same] == self._lead[same]:
            same += 1
        self._lead = self._lead[same:] if same == len(text) else ""
        return text[same:]

    def _thought(self, text: str) -> list[Piece]:
        return [Reasoning(text)] if text and self._reading.tell_reasoning else []

    def _answered(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [Content(text)] if self._calls is None else self._sieve(self._calls.push(text))

    def _sieve(self, pieces: list[Piece]) -> list[Piece]:
        if self._reading.parallel:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, (CallStart, CallArguments)) or piece.index == 0]
