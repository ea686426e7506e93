"""One response from its first event to its last: the object, its growth, and the part of it that is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from allspan.client.gateway.admission.active_request import ActiveRequest
from allspan.client.gateway.admission.admission import Job
from allspan.client.gateway.chat.reader import MessageReader, Reading
from allspan.client.gateway.chat.thinking import ThoughtCounter
from allspan.client.gateway.openai.shapes import Json, TokenTexts
from allspan.client.gateway.responses.output import OutputItems
from allspan.client.gateway.responses.request import ResponsesRequest
from allspan.protos.api.errors import AllspanError, RequestCancelled
from allspan.protos.api.results import TokenLogprob
from allspan.protos.text.stream.text_stream import TextDelta


@dataclass
class ResponseTurn:
    """A checked request and its answer as far as it has come. `begin` it, `push` all deltas; then `response` is whole.

    `begin`, `push` and `fail` give the events that tell of it.
    """

    request: ResponsesRequest
    job: Job
    reading: Reading
    texts: TokenTexts
    model: str
    input: list[Json]
    before: Sequence[Json]
    """Items of the conversation so far, which `input` continues."""
    response: Json = field(default_factory=dict)
    _output: OutputItems = field(default_factory=OutputItems)
    _pending: list[Json] = field(default_factory=list)
    """Log-probabilities of tokens whose text is still to come."""
    _sequence: int = 0

    def __post_init__(self) -> None:
        self._reader = MessageReader(self.reading)
        self._thoughts = ThoughtCounter(self.reading.tags, self.reading.opened, self.texts.piece)

    @property
    def is_kept(self) -> bool:
        return self.request.store is not False

    @property
    def history(self) -> list[Json]:
        """The whole conversation, this response's own items last."""
        return [*self.before, *self.input, *self._output.items]

    def begin(self, generation: ActiveRequest) -> list[Json]:
        self.response = self._head("resp_" + generation.handle.request_id)
        return [self._told("response.created"), self._told("response.in_progress")]

    def push(self, delta: TextDelta, generation: ActiveRequest) -> Iterator[Json]:
        self._thoughts.push(delta.token_ids)
        pieces = self._reader.push(delta.text)
        if delta.finished:
            pieces += self._reader.finish()
        if self.request.wants_logprobs:
            shown = len(delta.token_ids) - isinstance(delta.stop, int)  # less the token that ended it
            self._pending += self._logprobs(delta.token_ids[:shown], delta.logprobs[:shown])
        for event in self._output.push(pieces, self._pending):
            yield self._numbered(event)
        if pieces:
            self._pending.clear()
        if delta.finished:
            yield from self._finish(delta.finish_reason, generation)

    def fail(self, error: AllspanError, generation: ActiveRequest) -> Iterator[Json]:
        """Ends the response with an error; the output so far stays."""
        for event in self._output.finish("incomplete"):
            yield self._numbered(event)
        status = "cancelled" if isinstance(error, RequestCancelled) else "failed"
        self.response |= {
            "status": status,
            "output": self._output.items,
            "error": None if status == "cancelled" else {"code": "server_error", "message": error.message},
            "usage": self._usage(generation),
        }
        yield self._told("response.failed")

    def _finish(self, reason: str, generation: ActiveRequest) -> Iterator[Json]:
        status = "incomplete" if reason == "length" else "completed"
        for event in self._output.finish(status):
            yield self._numbered(event)
        self.response |= {"status": status, "output": self._output.items, "usage": self._usage(generation)}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        yield self._told(f"response.{status}")

    def _told(self, kind: str) -> Json:
        return self._numbered({"type": kind, "response": dict(self.response)})

    def _numbered(self, event: Json) -> Json:
        event["sequence_number"] = self._sequence
        self._sequence += 1
        return event

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Iterator[Json]:
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            top = [self._token(top_id, logprob) for top_id, logprob in entry.top]
            yield self._token(token_id, entry.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self.texts.text(token_id),
            "logprob": logprob,
            "bytes": list(self.texts.piece(token_id)),
        }

    def _usage(self, generation: ActiveRequest) -> Json:
        prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self._thoughts.count},
            "total_tokens": prompt + output,
        }

    def _head(self, response_id: str) -> Json:
        """Returns the fields that are known before the first token; the request's own are echoed."""
        request, params = self.request, self.job.params
        text, reasoning = request.text, request.reasoning
        return {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {
                "effort": reasoning and reasoning.effort,
                "summary": reasoning and reasoning.summary,
            },
            "service_tier": "default",
            "store": self.is_kept,
            "temperature": params.temperature,
            "text": {
                "format": (text and text.format) or {"type": "text"},
                "verbosity": (text and text.verbosity) or "medium",
            },
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }
