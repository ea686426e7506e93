"""A request's messages, checked and brought into one form: the one that chat templates are written for."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from allspan.protos.api.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_CALLS = 128
"""Most calls of one message."""

Message = dict[str, Any]
"""role (system, user, assistant, tool) and content (text; None only beside tool_calls); name, reasoning_content,
tool_calls ([{"id", "type", "function": {"name", "arguments": text}}]) and tool_call_id where there are any."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_MEDIA = ("image_url", "input_image", "input_audio", "file", "input_file", "video_url", "audio_url")


def read_messages(value: Any, field: str = "messages") -> list[Message]:
    """Returns the messages for a chat template; InvalidRequest names the place of an invalid one."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{field} is missing or empty, must be a list with at least one message", field)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"{field} has {len(value)} entries, at most {MAX_MESSAGES}", field)
    called: dict[str, str] = {}
    messages = []
    for i, item in enumerate(value):
        message = _Reader(field, f"{field}[{i}]").message(item)
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and (name := called.get(message["tool_call_id"])):
            message.setdefault("name", name)  # some templates print it
        messages.append(message)
    return messages


def characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the approximate length of the text that a template makes of the messages."""
    total = 0
    for message in messages:
        total += len(message["content"] or "") + len(message.get("reasoning_content", ""))
        for call in message.get("tool_calls", ()):
            total += len(call["function"]["name"]) + len(call["function"]["arguments"])
    return total


class _Reader:
    """The reader of one message."""

    def __init__(self, field: str, place: str) -> None:
        self._field = field
        self._place = place

    def message(self, item: Any) -> Message:
        if not isinstance(item, dict):
            raise self._refusal("", item, "must be an object with role and content")
        role = item.get("role")
        if role == "function":
            raise self._refusal(".role", role, "which is obsolete: use the role tool, with tool_call_id")
        if role not in _ROLES:
            raise self._refusal(".role", role, f"must be one of {', '.join(_ROLES)}")
        message: Message = {"role": "system" if role == "developer" else role}
        if role == "assistant":
            self._assistant(item, message)
        else:
            message["content"] = self._content(item.get("content"))
        if role == "tool":
            message["tool_call_id"] = self._text(item, "tool_call_id")
        if item.get("name") is not None:
            message["name"] = self._text(item, "name")
        return message

    def _assistant(self, item: dict[str, Any], message: Message) -> None:
        if item.get("function_call"):
            raise self._refusal(".function_call", item["function_call"], "which is obsolete: use tool_calls")
        if item.get("audio"):
            raise self._refusal(".audio", item["audio"], "only text is supported")
        calls, refusal = item.get("tool_calls"), item.get("refusal")
        if item.get("content") is None and (calls or refusal):
            message["content"] = None if refusal is None else self._text(item, "refusal")
        else:
            message["content"] = self._content(item.get("content"))
        if calls:
            message["tool_calls"] = self._calls(calls)
        for name in ("reasoning_content", "reasoning"):
            if item.get(name) is not None:
                message["reasoning_content"] = self._text(item, name)

    def _content(self, content: Any) -> str:
        if isinstance(content, str):
            return content
        if not isinstance(content, list) or not content:
            raise self._refusal(".content", content, "must be a string or a list of text parts")
        return "".join(self._part(f".content[{i}]", part) for i, part in enumerate(content))

    def _part(self, place: str, part: Any) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _OTHER_MEDIA:
            raise InvalidRequest(f"{self._place}{place} is of type {kind!r}: only text is supported", self._field)
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise self._refusal(place, part, "must be {'type': 'text', 'text': …}")
        return text

    def _calls(self, calls: Any) -> list[dict[str, Any]]:
        if not isinstance(calls, list):
            raise self._refusal(".tool_calls", calls, "must be a list of calls")
        if len(calls) > MAX_CALLS:
            raise InvalidRequest(f"{self._place}.tool_calls has {len(calls)} entries, at most {MAX_CALLS}", self._field)
        return [self._call(f".tool_calls[{i}]", call) for i, call in enumerate(calls)]

    def _call(self, place: str, call: Any) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise self._refusal(place, call, "must be {'id': …, 'type': 'function', 'function': …}")
        found = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
        for name, value in found.items():
            if not isinstance(value, str):
                where = name if name == "id" else f"function.{name}"
                raise self._refusal(f"{place}.{where}", value, "must be a string")
        return {
            "id": found["id"],
            "type": "function",
            "function": {"name": found["name"], "arguments": found["arguments"]},
        }

    def _text(self, item: dict[str, Any], name: str) -> str:
        value = item.get(name)
        if not isinstance(value, str):
            raise self._refusal(f".{name}", value, "must be a string")
        return value

    def _refusal(self, place: str, value: Any, problem: str) -> InvalidRequest:
        shown = reprlib.repr(value)
        return InvalidRequest(f"{self._place}{place} is {shown}, {problem}", self._field)
