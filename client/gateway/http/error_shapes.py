"""The bodies of errors, as the clients of each API read them: a row an API, by the beginning of its paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from allspan.protos.api.errors import ERRORS, AllspanError, InvalidRequest

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_OR_NULL: Json = {"type": ["string", "null"]}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """The form that the errors of one API have."""

    prefixes: tuple[str, ...]
    """The beginnings of the paths of that API."""
    body: Callable[[AllspanError, int], Json]
    """Returns the body for an error and its status."""
    schema: Json
    """The JSON schema of such a body."""


def shape_of(path: str) -> ErrorShape:
    """Returns the shape of errors for a path; OpenAI's for all paths that no other API has."""
    return next((shape for shape in SHAPES if path.startswith(shape.prefixes)), OPENAI)


def _openai(error: AllspanError, status: int) -> Json:
    kind = ERRORS[error.code].openai_type
    if status >= 500 and error.code == InvalidRequest.code:  # an error that exists in HTTP alone
        kind = "server_error"
    param = error.field if isinstance(error, InvalidRequest) else None
    code = None if error.code == InvalidRequest.code else error.code
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def _anthropic(error: AllspanError, status: int) -> Json:
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _ollama(error: AllspanError, status: int) -> Json:
    return {"error": error.message}


def _object(**fields: Json) -> Json:
    return {"type": "object", "properties": fields, "required": list(fields)}


OPENAI = ErrorShape((), _openai, _object(error=_object(message=_TEXT, type=_TEXT, param=_OR_NULL, code=_OR_NULL)))
SHAPES = (
    ErrorShape(
        ("/v1/messages",), _anthropic, _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))
    ),
    ErrorShape(("/api/",), _ollama, _object(error=_TEXT)),
)
