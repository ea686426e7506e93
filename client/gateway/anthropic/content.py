"""Converts Anthropic's messages, whose content is made of blocks, to the messages of a chat template."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from allspan.client.gateway.chat.messages import MAX_MESSAGES
from allspan.protos.api.errors import InvalidRequest

Json = dict[str, Any]

_BETWEEN = "\n\n"
"""The text between two blocks of text."""
_BILLING = "x-anthropic-billing-header:"
"""The beginning of a system block that clients write for Anthropic's servers; it differs from request to request."""


def read_conversation(system: Any, messages: Any) -> list[Json]:
    """Returns the conversation as OpenAI's messages; InvalidRequest names the place of what does not fit."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages is missing or empty, must be a list with at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages)} entries, at most {MAX_MESSAGES}", "messages")
    found: list[Json] = []
    if text := _system(system):
        found.append({"role": "system", "content": text})
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise _refusal(place, message, "must be an object with role and content")
        role = message.get("role")
        if role not in ("user", "assistant"):
            raise _refusal(f"{place}.role", role, "must be user or assistant; instructions go in the field system")
        blocks = _blocks(f"{place}.content", message.get("content"))
        found += [_assistant(blocks)] if role == "assistant" else _user(blocks)
    return found


def _system(value: Any) -> str:
    if value is None:
        return ""
    texts = [_text(place, block, "system") for place, block in _blocks("system", value, "system")]
    return _BETWEEN.join(text for text in texts if not text.startswith(_BILLING))


def _user(blocks: Sequence[tuple[str, Json]]) -> Iterator[Json]:
    """The results of tools are messages of their own, in their place among the texts."""
    texts: list[str] = []
    for place, block in blocks:
        if block["type"] != "tool_result":
            texts.append(_text(place, block))
            continue
        if texts:
            yield {"role": "user", "content": _BETWEEN.join(texts)}
            texts = []
        yield _result(place, block)
    if texts:
        yield {"role": "user", "content": _BETWEEN.join(texts)}


def _assistant(blocks: Sequence[tuple[str, Json]]) -> Json:
    texts, thoughts, calls = [], [], []
    for place, block in blocks:
        match block["type"]:
            case "thinking":
                thoughts.append(_string(f"{place}.thinking", block.get("thinking")))
            case "redacted_thinking":
                pass  # nobody but Anthropic can read it
            case "tool_use":
                calls.append(_call(place, block))
            case _:
                texts.append(_text(place, block))
    message: Json = {"role": "assistant", "content": _BETWEEN.join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _call(place: str, block: Json) -> Json:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise _refusal(f"{place}.input", arguments, "must be an object")
    name, call_id = (_string(f"{place}.{key}", block.get(key)) for key in ("name", "id"))
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


def _result(place: str, block: Json) -> Json:
    content = block.get("content")
    texts = [] if content in (None, []) else [_text(*inner) for inner in _blocks(f"{place}.content", content)]
    text = _BETWEEN.join(texts)
    if block.get("is_error"):
        text = f"Error: {text}"
    call_id = _string(f"{place}.tool_use_id", block.get("tool_use_id"))
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _blocks(place: str, content: Any, field: str = "messages") -> list[tuple[str, Json]]:
    """Returns each block, which has a type, with its place; a text is one block."""
    if isinstance(content, str):
        return [(place, {"type": "text", "text": content})]
    if not isinstance(content, list) or not content:
        raise _refusal(place, content, "must be a string or a list of blocks", field)
    for number, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _refusal(f"{place}[{number}]", block, "must be a block with a type", field)
    return [(f"{place}[{number}]", block) for number, block in enumerate(content)]


def _text(place: str, block: Json, field: str = "messages") -> str:
    kind, source = block["type"], block.get("source")
    if kind == "text":
        return _string(f"{place}.text", block.get("text"), field)
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _string(f"{place}.source.data", source.get("data"), field)
    raise InvalidRequest(f"{place} is of type {reprlib.repr(kind)}: only text is supported here", field)


def _string(place: str, value: Any, field: str = "messages") -> str:
    if not isinstance(value, str):
        raise _refusal(place, value, "must be a string", field)
    return value


def _refusal(place: str, value: Any, problem: str, field: str = "messages") -> InvalidRequest:
    return InvalidRequest(f"{place} is {'missing' if value is None else reprlib.repr(value)}, {problem}", field)
