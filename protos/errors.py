"""One exception tree for callers and one table for the wire.

    AllspanError
    ├── InvalidRequest        a field's value is refused (names field, value, limit)
    ├── ModelNotFound         no such model is served, or no such checkpoint
    ├── CheckpointError       a model's files cannot be read or are not supported
    ├── ConfigError           a flag or setting is refused before anything starts
    ├── QueueFull             too much load; try again later
    ├── RequestCancelled      stopped by its caller, or its caller went away
    ├── DeadlineExceeded      a bounded wait ran out
    ├── Unavailable           the world is down, loading or draining (says why)
    ├── AlreadyExists         a request id is in use
    └── InternalError         our bug

Every accepted request ends in exactly one of: finished, cancelled, failed with one of these.
"""

from __future__ import annotations

from dataclasses import dataclass


class AllspanError(Exception):
    """Base of every error that a caller can act upon. `code` is its key in ERRORS."""

    code = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(AllspanError):
    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelNotFound(AllspanError):
    code = "model_not_found"


class CheckpointError(AllspanError):
    code = "checkpoint"


class ConfigError(AllspanError):
    code = "config"


class QueueFull(AllspanError):
    code = "queue_full"


class RequestCancelled(AllspanError):
    code = "cancelled"


class DeadlineExceeded(AllspanError):
    code = "deadline_exceeded"


class Unavailable(AllspanError):
    code = "unavailable"


class AlreadyExists(AllspanError):
    code = "already_exists"


class InternalError(AllspanError):
    code = "internal"


@dataclass(frozen=True)
class ErrorRow:
    """How one class of error looks on each wire. `grpc` is the name of a grpc.StatusCode."""

    cls: type[AllspanError]
    grpc: str
    http: int
    openai_type: str


ERRORS: dict[str, ErrorRow] = {
    row.cls.code: row
    for row in (
        ErrorRow(InvalidRequest, "INVALID_ARGUMENT", 400, "invalid_request_error"),
        ErrorRow(ModelNotFound, "NOT_FOUND", 404, "invalid_request_error"),
        ErrorRow(CheckpointError, "FAILED_PRECONDITION", 500, "server_error"),
        ErrorRow(ConfigError, "FAILED_PRECONDITION", 500, "server_error"),
        ErrorRow(QueueFull, "RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
        ErrorRow(RequestCancelled, "CANCELLED", 499, "server_error"),
        ErrorRow(DeadlineExceeded, "DEADLINE_EXCEEDED", 504, "server_error"),
        ErrorRow(Unavailable, "UNAVAILABLE", 503, "server_error"),
        ErrorRow(AlreadyExists, "ALREADY_EXISTS", 409, "invalid_request_error"),
        ErrorRow(InternalError, "INTERNAL", 500, "server_error"),
    )
}


def from_code(code: str, message: str) -> AllspanError:
    """The exception for a wire code; an unknown code becomes InternalError and is named in the message."""
    row = ERRORS.get(code)
    if row is None:
        return InternalError(f"{message} (unknown error code {code!r})")
    return row.cls(message)


def from_grpc(status: str, message: str) -> AllspanError:
    """The exception for the name of a gRPC status, the first row that matches."""
    for row in ERRORS.values():
        if row.grpc == status:
            return row.cls(message)
    return InternalError(f"{message} (gRPC status {status})")
