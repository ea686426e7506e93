"""One message from its first event to its last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from allspan.client.gateway.admission.active_request import ActiveRequest
from allspan.client.gateway.admission.admission import Job
from allspan.client.gateway.anthropic.blocks import Blocks
from allspan.client.gateway.anthropic.request import MessagesRequest
from allspan.client.gateway.chat.reader import MessageReader, Reading
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.errors import body_of
from allspan.client.gateway.http.sse import event
from allspan.client.gateway.openai.chat import chat_job
from allspan.client.gateway.openai.chat_request import ChatRequest
from allspan.client.gateway.openai.schemas import parse, parse_value
from allspan.protos.api.errors import AllspanError, InvalidRequest
from allspan.protos.text.stream.text_stream import TextDelta

Json = dict[str, Any]

PATH = "/v1/messages"


@dataclass
class MessageTurn:
    """A checked request and its message as far as it has come (see `http.turns.Turn`)."""

    job: Job
    reading: Reading
    model: str
    is_streamed: bool
    most_tokens: int
    """The length of the output that the request allows; the context may have less room."""
    media_type: str = "text/event-stream"
    _blocks: Blocks = field(default_factory=Blocks)
    _end: Json = field(default_factory=lambda: {"stop_reason": None, "stop_sequence": None})

    def __post_init__(self) -> None:
        self._reader = MessageReader(self.reading)

    def begin(self, generation: ActiveRequest) -> Iterator[bytes]:
        yield from _events([{"type": "message_start", "message": self.whole(generation)}, {"type": "ping"}])

    def push(self, delta: TextDelta, generation: ActiveRequest) -> Iterator[bytes]:
        yield from _events(self._blocks.push(self._reader.push(delta.text)))
        if delta.finished:
            yield from _events(self._blocks.push(self._reader.finish()))
            yield from _events(self._blocks.finish())
            self._end = self._ended(delta)
            told = {"type": "message_delta", "delta": self._end, "usage": _usage(generation)}
            yield from _events([told, {"type": "message_stop"}])

    def fail(self, error: AllspanError) -> Iterator[bytes]:
        yield event(body_of(error, PATH), "error")

    def whole(self, generation: ActiveRequest) -> Json:
        return {
            "id": "msg_" + generation.handle.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self._blocks.found),
            **self._end,
            "usage": _usage(generation),
        }

    def _ended(self, delta: TextDelta) -> Json:
        if delta.finish_reason == "length":
            is_full = self.job.params.max_tokens < self.most_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif self._blocks.has_calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if isinstance(delta.stop, str) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": delta.stop if reason == "stop_sequence" else None}


async def plan_message(context: GatewayContext, body: bytes) -> MessageTurn:
    """Checks everything; nothing runs yet."""
    limits = context.config.limits
    request = parse(MessagesRequest, body, limits)
    context.model.check_name(request.model)
    if request.max_tokens is None:
        raise InvalidRequest("max_tokens is missing, must be a number of tokens", "max_tokens")
    chat = parse_value(ChatRequest, request.conversation(), limits)
    job, reading = await chat_job(context, chat, most_tokens=request.max_tokens)
    return MessageTurn(job, reading, context.model.answered(job.options), bool(request.stream), request.max_tokens)


def _events(told: Iterator[Json] | Sequence[Json]) -> Iterator[bytes]:
    return (event(data, data["type"]) for data in told)


def _usage(generation: ActiveRequest) -> Json:
    cached = generation.num_cached_tokens
    return {
        "input_tokens": generation.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generation.num_output_tokens,
    }
