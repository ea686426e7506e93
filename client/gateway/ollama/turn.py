"""One answer of /api/chat or /api/generate from its first line to its last."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from allspan.client.gateway.admission.active_request import ActiveRequest
from allspan.client.gateway.admission.admission import Job
from allspan.client.gateway.chat.pieces import Call, CallArguments, CallStart, Content, Message, Piece, arguments_of
from allspan.client.gateway.chat.reader import MessageReader, Reading
from allspan.client.gateway.http.errors import body_of
from allspan.protos.api.errors import AllspanError
from allspan.protos.text.stream.text_stream import TextDelta

Json = dict[str, Any]

NDJSON = "application/x-ndjson"


@dataclass
class OllamaTurn:
    """A checked request and its answer as far as it has come (see `http.turns.Turn`)."""

    job: Job
    reading: Reading
    model: str
    """The name that the request used."""
    is_streamed: bool
    is_chat: bool
    media_type: str = NDJSON
    began: float = field(default_factory=time.monotonic)
    _message: Message = field(default_factory=Message)
    _told: int = 0
    """The number of calls that were told; one is told as a whole."""
    _end: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reader = MessageReader(self.reading)

    def begin(self, generation: ActiveRequest) -> Iterator[bytes]:
        yield from ()

    def push(self, delta: TextDelta, generation: ActiveRequest) -> Iterator[bytes]:
        yield from self._read(self._reader.push(delta.text))
        if delta.finished:
            yield from self._read(self._reader.finish())
            yield from self._calls(len(self._message.calls))
            self._end = self._ended(delta.finish_reason, generation)
            yield self._line(self._content("") | self._end)

    def fail(self, error: AllspanError) -> Iterator[bytes]:
        yield _encoded(body_of(error, "/api/"))

    def whole(self, generation: ActiveRequest) -> Json:
        message = self._message
        content = self._content(message.content or "", message.reasoning)
        if message.calls:
            content["message"]["tool_calls"] = [_call(place, call) for place, call in enumerate(message.calls)]
        return stamped(self.model) | content | self._end

    def _read(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        for piece in pieces:
            self._message.add(piece)
            if isinstance(piece, CallStart):
                yield from self._calls(piece.index)
            elif isinstance(piece, Content):
                yield self._line(self._content(piece.text))
            elif not isinstance(piece, CallArguments):
                yield self._line(self._content("", piece.text))

    def _calls(self, count: int) -> Iterator[bytes]:
        """Tells the calls that are complete: the first `count`."""
        for place in range(self._told, count):
            message = {"role": "assistant", "content": "", "tool_calls": [_call(place, self._message.calls[place])]}
            yield self._line({"message": message})
        self._told = max(self._told, count)

    def _content(self, text: str, thought: str | None = None) -> Json:
        thinking = {"thinking": thought} if thought else {}
        if self.is_chat:
            return {"message": {"role": "assistant", "content": text, **thinking}}
        return {"response": text, **thinking}

    def _line(self, fields: Json) -> bytes:
        return _encoded(stamped(self.model) | {"done": False} | fields)

    def _ended(self, reason: str, generation: ActiveRequest) -> Json:
        timings = generation.timings
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": _ns(time.monotonic() - self.began),
            "load_duration": _ns(timings.queue_s),
            "prompt_eval_count": generation.num_prompt_tokens,
            "prompt_eval_duration": _ns(timings.ttft_s - timings.queue_s),
            "eval_count": generation.num_output_tokens,
            "eval_duration": _ns(timings.total_s - timings.ttft_s),
        }


def stamped(model: str) -> Json:
    """Returns the fields that every answer begins with."""
    return {"model": model, "created_at": iso(time.time())}


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _call(place: int, call: Call) -> Json:
    return {"id": call.id, "function": {"index": place, "name": call.name, "arguments": arguments_of(call.arguments)}}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _encoded(data: Json) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
