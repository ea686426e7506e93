"""Turns the pieces of an output into a response's items, with their events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allspan.client.gateway.chat.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from allspan.client.gateway.openai.shapes import Json
from allspan.client.gateway.responses.items import new_id


class OutputItems:
    """`push` the pieces in order, then `finish`. Events have everything but their sequence number."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        """The items that are complete."""
        self._item: Json | None = None
        self._texts: list[str] = []
        self._logprobs: list[Json] = []

    def push(self, pieces: Sequence[Piece], logprobs: Sequence[Json] = ()) -> Iterator[Json]:
        """`logprobs`: of the tokens behind the text among these pieces."""
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    yield from self._open("reasoning")
                    yield self._delta("response.reasoning_text.delta", text)
                case Content(text):
                    yield from self._open("message")
                    yield self._delta("response.output_text.delta", text) | {"logprobs": list(logprobs)}
                    self._logprobs += logprobs
                    logprobs = ()
                case CallStart(_, id=call_id, name=name):
                    yield from self._close("completed")
                    yield from self._start({"type": "function_call", "call_id": call_id, "name": name})
                case CallArguments(_, text):
                    yield self._delta("response.function_call_arguments.delta", text)

    def finish(self, status: str) -> Iterator[Json]:
        """An output without anything is a message without text."""
        if self._item is None and not self.items:
            yield from self._open("message")
        yield from self._close(status)

    def _open(self, kind: str) -> Iterator[Json]:
        if self._item is None or self._item["type"] != kind:
            yield from self._close("completed")
            yield from self._start({"type": kind})

    def _start(self, head: Json) -> Iterator[Json]:
        kind = head["type"]
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self._item = {"id": new_id(prefix), **head}
        self._texts, self._logprobs = [], []
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items),
            "item": self._whole("in_progress", started=False),
        }
        if kind != "function_call":
            yield self._at("response.content_part.added") | {"part": self._part()}

    def _close(self, status: str) -> Iterator[Json]:
        if self._item is None:
            return
        kind, text = self._item["type"], "".join(self._texts)
        if kind == "function_call":
            yield self._at("response.function_call_arguments.done") | {"name": self._item["name"], "arguments": text}
        elif kind == "reasoning":
            yield self._at("response.reasoning_text.done") | {"text": text}
        else:
            yield self._at("response.output_text.done") | {"text": text, "logprobs": self._logprobs}
        if kind != "function_call":
            yield self._at("response.content_part.done") | {"part": self._part()}
        item = self._whole(status)
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
        self._item = None

    def _whole(self, status: str, started: bool = True) -> Json:
        """The item at hand, with the text that there is; before it has `started`, without a part for text."""
        assert self._item is not None
        item = self._item | {"status": status}
        if item["type"] == "function_call":
            return item | {"arguments": "".join(self._texts)}
        if item["type"] == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        return item | {"content": [self._part()] if started else []}

    def _part(self) -> Json:
        assert self._item is not None
        text = "".join(self._texts)
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _delta(self, kind: str, text: str) -> Json:
        self._texts.append(text)
        return self._at(kind) | {"delta": text}

    def _at(self, kind: str) -> Json:
        assert self._item is not None
        place: Json = {"type": kind, "item_id": self._item["id"], "output_index": len(self.items)}
        if self._item["type"] != "function_call":
            place["content_index"] = 0
        return place
