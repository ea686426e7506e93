"""Errors as answers: a status, a body that the API's clients read, and for full queues a time to come back."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from allspan.client.gateway.admission.admission import RETRY_AFTER_S
from allspan.client.gateway.http.error_shapes import shape_of
from allspan.protos.api.errors import ERRORS, AllspanError, InternalError

# The rest of the body is still to come, and nobody is going to read it.
_UNREAD = (408, 413)


class HttpError(AllspanError):
    """An error that exists in HTTP alone (a body too large, no such path …)."""

    code = "invalid_request"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.http_status = status


def status_of(error: AllspanError) -> int:
    return error.http_status if isinstance(error, HttpError) else ERRORS[error.code].http


def body_of(error: AllspanError, path: str = "") -> dict[str, Any]:
    """Returns the error as the clients of the path's API read it."""
    return shape_of(path).body(error, status_of(error))


def response_of(error: AllspanError, path: str = "") -> Response:
    """Returns the answer of the path's API for an error."""
    status = status_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else {}
    if status in _UNREAD:
        headers["Connection"] = "close"
    return JSONResponse(body_of(error, path), status, headers)


def internal(request_id: str) -> InternalError:
    """Returns the answer for an unexpected error: it has the id under which the log has the traceback."""
    return InternalError(f"internal error; the server's log says more under {request_id}")
