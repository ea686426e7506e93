"""Converts between the items of /v1/responses and the messages of a chat template."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from allspan.client.gateway.chat.messages import MAX_MESSAGES
from allspan.protos.api.errors import InvalidRequest

Json = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def read_items(value: Any) -> list[Json]:
    """Returns the items of `input`, each with its id; InvalidRequest names the place of an invalid one."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        what = "missing" if value is None else "an empty list" if value == [] else f"a {type(value).__name__}"
        raise InvalidRequest(f"input is {what}, must be a string or a list of items", "input")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"input has {len(value)} items, at most {MAX_MESSAGES}", "input")
    return [_item(f"input[{place}]", item) for place, item in enumerate(value)]


def to_messages(items: Sequence[Json], instructions: str | None) -> list[Json]:
    """Calls that follow each other, the text before them and what was thought before that are one message of the
    assistant."""
    messages: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    thought: Json = {}
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            text = _joined(item.get("content") or ())
            thought = {"reasoning_content": text} if text else {}
        elif kind == "message":
            shown = thought if item["role"] == "assistant" else {}
            messages.append({"role": item["role"], "content": _joined(item["content"]), **shown})
            thought = {}
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            if not messages or messages[-1]["role"] != "assistant" or thought:
                messages.append({"role": "assistant", "content": None, **thought})
                thought = {}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _joined(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    return messages


def _item(place: str, item: Any) -> Json:
    if not isinstance(item, dict):
        raise InvalidRequest(
            f"{place} is {_short(item)}, must be an object with a type, or a role and content", "input"
        )
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise InvalidRequest(
                f"{place}.role is {_short(item.get('role'))}, must be one of {', '.join(_ROLES)}", "input"
            )
        content = _content(f"{place}.content", item.get("content"), item["role"] == "assistant")
        return {"type": kind, "id": _id(item, "msg"), "role": item["role"], "content": content, "status": "completed"}
    if kind == "function_call":
        texts = {name: _text(f"{place}.{name}", item.get(name)) for name in ("call_id", "name", "arguments")}
        return {"type": kind, "id": _id(item, "fc"), **texts, "status": "completed"}
    if kind == "function_call_output":
        call_id = _text(f"{place}.call_id", item.get("call_id"))
        output = item.get("output")
        output = output if isinstance(output, str) else _content(f"{place}.output", output, False)
        return {"type": kind, "id": _id(item, "fco"), "call_id": call_id, "output": output, "status": "completed"}
    if kind == "reasoning":
        thought = _content(f"{place}.content", item["content"], False) if item.get("content") else []
        return {"type": kind, "id": _id(item, "rs"), "summary": [], "content": thought, "status": "completed"}
    ways = {"item_reference": "give the item itself, or previous_response_id"}
    way = ways.get(kind if isinstance(kind, str) else "", "messages and calls of functions are")
    raise InvalidRequest(f"{place} is of type {_short(kind)}, which is not supported; {way}", "input")


def _content(place: str, content: Any, is_output: bool) -> list[Json]:
    if isinstance(content, str):
        content = [{"type": "output_text" if is_output else "input_text", "text": content}]
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{place} is {_short(content)}, must be a string or a list of text parts", "input")
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            raise InvalidRequest(f"{place}[{i}] is of type {_short(kind)}: only text is supported", "input")
        text = _text(f"{place}[{i}]", part.get("refusal" if kind == "refusal" else "text"))
        parts.append({"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {}))
    return parts


def _joined(content: str | Sequence[Json]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{place} is {_short(value)}, must be a string", "input")
    return value


def _id(item: Json, prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= 128 else new_id(prefix)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
