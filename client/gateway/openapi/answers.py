"""What the endpoints answer, as JSON schemas: what a caller may rely upon."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_OR_NULL: Json = {"type": ["string", "null"]}


def _object(**fields: Json) -> Json:
    """With these fields, and perhaps others."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(of: Json) -> Json:
    return {"type": "array", "items": of}


ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_OR_NULL, code=_OR_NULL))
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, root=_TEXT, max_model_len=_COUNT)
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_LOGPROBS: Json = {"type": ["object", "null"]}
_REASON: Json = {"enum": ["stop", "length", "tool_calls", "function_call", "error"]}
_CHOICE = _object(index=_COUNT, text=_TEXT, logprobs=_LOGPROBS, finish_reason=_REASON)
_MESSAGE = _object(role={"const": "assistant"}, content=_OR_NULL)
_CHAT_CHOICE = _object(index=_COUNT, message=_MESSAGE, logprobs=_LOGPROBS, finish_reason=_REASON)


def _envelope(kind: str, choice: Json) -> Json:
    return _object(id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=_list(choice), usage=_USAGE)


_RESPONSE = _object(
    id=_TEXT,
    object={"const": "response"},
    created_at=_COUNT,
    status={"enum": ["completed", "incomplete", "failed", "cancelled", "in_progress"]},
    model=_TEXT,
    output=_list(_object(type=_TEXT, id=_TEXT)),
)

ANSWERS: dict[tuple[str, str], Json] = {
    ("get", "/v1/models"): _object(object={"const": "list"}, data=_list(_MODEL)),
    ("get", "/v1/models/{name}"): _MODEL,
    ("post", "/v1/completions"): _envelope("text_completion", _CHOICE),
    ("post", "/v1/chat/completions"): _envelope("chat.completion", _CHAT_CHOICE),
    ("post", "/v1/responses"): _RESPONSE,
    ("get", "/v1/responses/{response_id}"): _RESPONSE,
    ("post", "/v1/responses/input_tokens"): _object(object={"const": "response.input_tokens"}, input_tokens=_COUNT),
    ("delete", "/v1/responses/{response_id}"): _object(id=_TEXT, object={"const": "response"}, deleted={"const": True}),
    ("post", "/v1/responses/{response_id}/cancel"): _object(id=_TEXT, status={"const": "cancelled"}),
    ("get", "/v1/responses/{response_id}/input_items"): _object(
        object={"const": "list"}, data=_list(_object(id=_TEXT))
    ),
    ("get", "/tokenizer_info"): _object(vocab_size=_COUNT, bos_token=_OR_NULL, eos_token=_OR_NULL),
    ("post", "/tokenize"): _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
    ("post", "/detokenize"): _object(prompt=_TEXT),
}
"""By method and path."""
