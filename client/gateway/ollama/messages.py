"""Converts Ollama's messages to OpenAI's: its calls have no ids, its arguments are objects."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from allspan.client.gateway.chat.messages import MAX_MESSAGES
from allspan.protos.api.errors import InvalidRequest

Json = dict[str, Any]

_ROLES = ("system", "user", "assistant", "tool")


def read_messages(messages: list[Any]) -> list[Json]:
    """Returns OpenAI's messages; InvalidRequest names the place of what does not fit."""
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages)} entries, at most {MAX_MESSAGES}", "messages")
    pending: list[tuple[str, str]] = []
    return [_message(number, message, pending) for number, message in enumerate(messages)]


def _message(number: int, message: Any, pending: list[tuple[str, str]]) -> Json:
    """`pending`: (name, id) of the calls without a result so far."""
    place = f"messages[{number}]"
    if not isinstance(message, dict):
        raise _refusal(place, message, "must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise _refusal(f"{place}.role", role, f"must be one of {', '.join(_ROLES)}")
    if content is not None and not isinstance(content, str):
        raise _refusal(f"{place}.content", content, "must be a string")
    refuse_images(f"{place}.images", message.get("images"), "messages")
    found: Json = {"role": role, "content": content or ""}
    if role == "tool":
        found["tool_call_id"] = _answered(message, pending)
    if role == "assistant":
        if message.get("thinking"):
            found["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            found["tool_calls"] = _calls(number, message["tool_calls"], pending)
    return found


def _calls(message: int, calls: Any, pending: list[tuple[str, str]]) -> list[Json]:
    place = f"messages[{message}].tool_calls"
    if not isinstance(calls, list):
        raise _refusal(place, calls, "must be a list of calls")
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        name, arguments = (function.get(key) for key in ("name", "arguments")) if isinstance(function, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
            raise _refusal(f"{place}[{number}]", call, "must be {'function': {'name': …, 'arguments': {…}}}")
        given = call.get("id")
        call_id = given if isinstance(given, str) and given else f"call_{message}_{number}"
        pending.append((name, call_id))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": text}})
    return found


def _answered(message: Json, pending: list[tuple[str, str]]) -> str:
    """Returns the id of the call that a result answers: the one that it names, or else the first without a result."""
    given, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
    for entry in pending:
        if (given == entry[1]) if given else (name in (None, entry[0])):
            pending.remove(entry)
            return entry[1]
    return given if isinstance(given, str) and given else "call_unknown"


def refuse_images(place: str, images: Any, field: str) -> None:
    """Raises InvalidRequest for images, unless there are none."""
    if images:
        raise InvalidRequest(f"{place} has {len(images)} images: only text is supported here", field)


def _refusal(place: str, value: Any, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{place} is {'missing' if value is None else reprlib.repr(value)}, {problem}", "messages")
