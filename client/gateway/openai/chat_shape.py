"""chat.completion and chat.completion.chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from allspan.client.gateway.admission.active_request import ActiveRequest
from allspan.client.gateway.chat.pieces import CallArguments, CallStart, Content, Message, Piece, Reasoning
from allspan.client.gateway.chat.reader import MessageReader, Reading
from allspan.client.gateway.chat.thinking import ThoughtCounter
from allspan.client.gateway.openai.shapes import Gathered, Json, TokenTexts
from allspan.protos.api.results import TokenLogprob
from allspan.protos.text.stream.text_stream import TextDelta


class ChatShape:
    """The shape of one chat request's answer."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    envelope: Json = {"service_tier": "default"}  # noqa: RUF012 - read only

    def __init__(
        self,
        texts: TokenTexts,
        reading: Reading,
        prompt: Sequence[int],
        with_logprobs: bool,
        with_prompt_logprobs: bool,
        with_token_ids: bool,
    ) -> None:
        self._texts = texts
        self._reading = reading
        self._prompt = prompt
        self._with_logprobs = with_logprobs
        self._with_prompt_logprobs = with_prompt_logprobs
        self._with_token_ids = with_token_ids
        self._choices: dict[int, _Choice] = {}
        self._is_plain = not (reading.tags or reading.form or reading.lead or with_logprobs or with_token_ids)

    def opening(self, index: int, generation: ActiveRequest) -> list[Json]:
        content = None if self._reading.tags or self._reading.form else ""
        return [self._piece(index, {"role": "assistant", "content": content, "refusal": None})]

    def pieces(self, index: int, delta: TextDelta) -> list[Json]:
        if self._is_plain and delta.text and not delta.finished:  # nearly all of them
            return [self._piece(index, {"content": delta.text})]
        choice = self._choice(index)
        choice.thoughts.push(delta.token_ids)
        found = choice.reader.push(delta.text)
        if delta.finished:
            found += choice.reader.finish()
        choice.calls = choice.calls or any(isinstance(piece, CallStart) for piece in found)
        logprobs = self._logprobs(delta.token_ids, delta.logprobs) if delta.logprobs else None
        pieces = [self._piece(index, _delta(piece)) for piece in found]
        if not pieces and (logprobs or (self._with_token_ids and delta.token_ids)):
            pieces.append(self._piece(index, {"content": ""}))
        if pieces:
            pieces[0]["logprobs"] = logprobs
            if self._with_token_ids:
                pieces[0]["token_ids"] = list(delta.token_ids)
        if delta.finished:
            reason = _finish_reason(delta.finish_reason, choice.calls)
            pieces.append(self._piece(index, {}, finish_reason=reason))
        return pieces

    def choice(self, index: int, gathered: Gathered) -> Json:
        own = self._choice(index)
        own.thoughts.push(gathered.token_ids)
        message = Message()
        for piece in (*own.reader.push("".join(gathered.texts)), *own.reader.finish()):
            message.add(piece)
        choice = {
            "index": index,
            "message": _message(message),
            "logprobs": self._logprobs(gathered.token_ids, gathered.logprobs),
            "finish_reason": _finish_reason(gathered.finish_reason, bool(message.calls)),
        }
        return choice | ({"token_ids": gathered.token_ids} if self._with_token_ids else {})

    def extras(self, gathered: Sequence[Gathered]) -> Json:
        extras: Json = {}
        if self._with_prompt_logprobs:
            extras["prompt_logprobs"] = self._texts.of_prompt(gathered[0].prompt_logprobs)
        if self._with_token_ids:
            extras["prompt_token_ids"] = list(self._prompt)
        return extras

    def usage_details(self) -> Json:
        thoughts = sum(choice.thoughts.count for choice in self._choices.values())
        return {"completion_tokens_details": {"reasoning_tokens": thoughts}}

    def _choice(self, index: int) -> _Choice:
        if index not in self._choices:
            self._choices[index] = _Choice(self._reading, self._texts)
        return self._choices[index]

    def _piece(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _logprobs(self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprob]) -> Json | None:
        if not self._with_logprobs:
            return None
        content = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            top = [self._token(top_id, logprob) for top_id, logprob in entry.top]
            content.append(self._token(token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        piece = self._texts.piece(token_id)
        return {"token": self._texts.text(token_id), "logprob": logprob, "bytes": list(piece)}


class _Choice:
    """The state of one choice."""

    def __init__(self, reading: Reading, texts: TokenTexts) -> None:
        self.reader = MessageReader(reading)
        self.thoughts = ThoughtCounter(reading.tags, reading.opened, texts.piece)
        self.calls = False


def _finish_reason(reason: str, called: bool) -> str:
    return "tool_calls" if called and reason == "stop" else reason


def _delta(piece: Piece) -> Json:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(message: Message) -> Json:
    nothing = message.content is None and message.reasoning is None and not message.calls
    found: dict[str, Any] = {
        "role": "assistant",
        "content": "" if nothing else message.content,
        "refusal": None,
        "annotations": [],
    }
    if message.reasoning is not None:
        found |= _reasoning(message.reasoning)
    if message.calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return found


def _reasoning(text: str) -> Json:
    """Returns the reasoning under both names in use: `reasoning_content` (DeepSeek, SGLang), `reasoning` (OpenRouter,
    vLLM)."""
    return {"reasoning_content": text, "reasoning": text}
