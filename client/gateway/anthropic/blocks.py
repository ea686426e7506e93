"""Turns the pieces of an output into a message's blocks, with their events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from allspan.client.gateway.chat.pieces import CallArguments, CallStart, Content, Piece, Reasoning, arguments_of

Json = dict[str, Any]


class Blocks:
    """`push` the pieces in order, then `finish`; both yield events. `found` has the blocks that are complete."""

    def __init__(self) -> None:
        self.found: list[Json] = []
        self._block: Json | None = None
        self._texts: list[str] = []

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.found)

    def push(self, pieces: Sequence[Piece]) -> Iterator[Json]:
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text}, text)
                case Content(text):
                    yield from self._open({"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text}, text)
                case CallStart(_, id=call_id, name=name):
                    yield from self._close()
                    yield from self._open({"type": "tool_use", "id": tool_use_id(call_id), "name": name, "input": {}})
                case CallArguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text}, text)

    def finish(self) -> Iterator[Json]:
        """An output without anything is a message without blocks."""
        yield from self._close()

    def _open(self, block: Json) -> Iterator[Json]:
        if self._block is None or self._block["type"] != block["type"]:
            yield from self._close()
            self._block, self._texts = block, []
            yield {"type": "content_block_start", "index": len(self.found), "content_block": dict(block)}

    def _delta(self, delta: Json, text: str) -> Json:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self.found), "delta": delta}

    def _close(self) -> Iterator[Json]:
        if self._block is None:
            return
        block, text = self._block, "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = arguments_of(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":  # clients expect one; nothing is signed here
            signature = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": len(self.found), "delta": signature}
        yield {"type": "content_block_stop", "index": len(self.found)}
        self.found.append(block)
        self._block = None


def tool_use_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}"
