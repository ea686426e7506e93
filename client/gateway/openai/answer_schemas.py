"""JSON schemas from which the endpoints put together what their callers may rely upon."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
EVENTS = ("text/event-stream",)
"""The media type of an answer that is streamed."""
OR_NULL: Json = {"type": ["string", "null"]}


def object_of(**fields: Json) -> Json:
    """An object with these fields, and perhaps others."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def list_of(of: Json) -> Json:
    """An array of these."""
    return {"type": "array", "items": of}


MODEL = object_of(
    id=TEXT,
    object={"const": "model"},
    created=COUNT,
    owned_by=TEXT,
    root=TEXT,
    parent=OR_NULL,
    max_model_len=COUNT,
    capabilities=list_of(TEXT),
    sampling_defaults={"type": "object", "additionalProperties": {"type": "number"}},
    sampling_defaults_source=TEXT,
)
MODELS = object_of(object={"const": "list"}, data=list_of(MODEL))
USAGE = object_of(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
LOGPROBS: Json = {"type": ["object", "null"]}
REASON: Json = {"enum": ["stop", "length", "tool_calls", "function_call", "error"]}
CHOICE = object_of(index=COUNT, text=TEXT, logprobs=LOGPROBS, finish_reason=REASON)
MESSAGE = object_of(role={"const": "assistant"}, content=OR_NULL)
CHAT_CHOICE = object_of(index=COUNT, message=MESSAGE, logprobs=LOGPROBS, finish_reason=REASON)


def envelope(kind: str, choice: Json) -> Json:
    """The answer of an endpoint that generates, with its choices."""
    return object_of(id=TEXT, object={"const": kind}, created=COUNT, model=TEXT, choices=list_of(choice), usage=USAGE)


RESPONSE = object_of(
    id=TEXT,
    object={"const": "response"},
    created_at=COUNT,
    status={"enum": ["completed", "incomplete", "failed", "cancelled", "in_progress"]},
    model=TEXT,
    output=list_of(object_of(type=TEXT, id=TEXT)),
)
