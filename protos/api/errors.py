"""The tree of exceptions for callers, and the table of their codes in each protocol.

    AllspanError
    ├── InvalidRequest        a field's value is refused (names field, value, limit)
    ├── ModelNotFound         no such model is served, or no such checkpoint
    │   └── AdapterNotFound   no such LoRA adapter is served
    ├── CheckpointError       a model's files cannot be read or are not supported
    │   └── AdapterRank           a LoRA adapter has a higher rank than slots have room for
    ├── ConfigError           a flag or setting is refused before anything starts
    ├── QueueFull             too much load; try again later
    ├── StreamNotRead         a client does not read what it asked for
    ├── RequestCancelled      stopped by its caller, or its caller went away
    ├── DeadlineExceeded      a bounded wait ran out
    ├── Unavailable           the world is down, loading or draining (says why)
    ├── AlreadyExists         a request id is in use
    │   └── AdapterLoaded         a LoRA adapter of this name is loaded
    ├── TooManyAdapters       as many LoRA adapters are loaded as there is room for
    │   └── AdapterInUse          requests still use an adapter that was unloaded
    ├── Unauthenticated       no key came with the call, or one that is not known
    ├── PermissionDenied      the call is not for this caller's key
    └── InternalError         our bug

Every accepted request ends in exactly one of: finished, cancelled, failed with one of these.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_CHECKPOINT_MESSAGE = 2000
"""Characters."""


class StatusCode(enum.IntEnum):
    """The numbers by which DashInfer's users know how a call ended; every error has one of them as its `status`.

    Some never come from here, since what they tell of does not happen: they are listed for those who compare.
    """

    SUCCESS = 0
    """A call that raises nothing."""
    UNKNOWN_ERROR = 1
    PARAM_ERROR = 2
    IO_ERROR = 3
    MEMORY_ERROR = 4
    """Not used: too little memory is a refused setting, PARAM_ERROR, before anything starts."""
    RUNTIME_ERROR = 5
    EXCEED_LIMIT_ERROR = 7
    INVALID_CALL_ERROR = 8
    """Not used: a call out of order is REQUEST_DENIED, with the call that is needed first."""
    EMPTY_REQUEST = 9
    """Not used: stopping or releasing a request that has ended is no error."""
    ILLEGAL_REQUEST_ID = 10
    CACHE_MEMORY_OUT = 11
    """Not used: a request whose pages run out waits and is resumed later."""
    REQUEST_DENIED = 12
    CHUNK_PREFILL = 14
    """Not used: prompts are computed in chunks."""
    DEPRECATED = 20
    """Never."""
    LORA_NUM_EXCEED_LIMIT = 21
    """An adapter more than may be loaded while the model runs; at the start that is PARAM_ERROR."""
    LORA_RANK_EXCEED_LIMIT = 22
    LORA_NOT_FOUND = 23
    LORA_ALREADY_LOADED = 24
    LORA_IN_USE = 25
    """Never of unloading: it succeeds, and the place is free once the requests that have the adapter have ended."""
    STREAMING = 200
    """Not used: a request's state is `ResultQueue.state`."""


class AllspanError(Exception):
    """Base of every error that a caller can act upon. `code` is its key in ERRORS."""

    code = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def status(self) -> StatusCode:
        """This error as a number."""
        return ERRORS[self.code].status


class InvalidRequest(AllspanError):
    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelNotFound(AllspanError):
    code = "model_not_found"


class AdapterNotFound(ModelNotFound):
    """Raised where an adapter is asked for as such; a model's name that means none is ModelNotFound."""

    code = "adapter_not_found"


class CheckpointError(AllspanError):
    """Its message quotes a model's files, so it is made one printable line, whatever names and values those hold."""

    code = "checkpoint"

    def __init__(self, message: str) -> None:
        shown = message if message.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        super().__init__(shown if len(shown) <= MAX_CHECKPOINT_MESSAGE else f"{shown[:MAX_CHECKPOINT_MESSAGE]}…")


class AdapterRank(CheckpointError):
    code = "adapter_rank"


class ConfigError(AllspanError):
    code = "config"


class QueueFull(AllspanError):
    code = "queue_full"


class StreamNotRead(AllspanError):
    code = "stream_not_read"


class RequestCancelled(AllspanError):
    code = "cancelled"


class DeadlineExceeded(AllspanError):
    code = "deadline_exceeded"


class Unavailable(AllspanError):
    code = "unavailable"


class AlreadyExists(AllspanError):
    code = "already_exists"


class AdapterLoaded(AlreadyExists):
    """Raised by a load, of an adapter whose name another one has."""

    code = "adapter_loaded"


class TooManyAdapters(AllspanError):
    code = "too_many_adapters"


class AdapterInUse(TooManyAdapters):
    """Raised where there would be room if the requests of adapters that were unloaded had ended."""

    code = "adapter_in_use"


class Unauthenticated(AllspanError):
    code = "invalid_api_key"


class PermissionDenied(AllspanError):
    code = "permission_denied"


class InternalError(AllspanError):
    code = "internal"


@dataclass(frozen=True)
class ErrorRow:
    """The codes of one class of error in each protocol. `grpc` is the name of a grpc.StatusCode."""

    cls: type[AllspanError]
    grpc: str
    http: int
    openai_type: str
    status: StatusCode


# What only HTTP can refuse (405, 413, 415 …) has its statuses in client/gateway/http/errors.py.
ERRORS: dict[str, ErrorRow] = {
    row.cls.code: row
    for row in (
        ErrorRow(InvalidRequest, "INVALID_ARGUMENT", 400, "invalid_request_error", StatusCode.PARAM_ERROR),
        ErrorRow(AdapterRank, "INVALID_ARGUMENT", 400, "invalid_request_error", StatusCode.LORA_RANK_EXCEED_LIMIT),
        ErrorRow(ModelNotFound, "NOT_FOUND", 404, "invalid_request_error", StatusCode.PARAM_ERROR),
        ErrorRow(AdapterNotFound, "NOT_FOUND", 404, "invalid_request_error", StatusCode.LORA_NOT_FOUND),
        ErrorRow(CheckpointError, "FAILED_PRECONDITION", 500, "server_error", StatusCode.IO_ERROR),
        ErrorRow(ConfigError, "FAILED_PRECONDITION", 500, "server_error", StatusCode.PARAM_ERROR),
        ErrorRow(QueueFull, "RESOURCE_EXHAUSTED", 429, "rate_limit_error", StatusCode.EXCEED_LIMIT_ERROR),
        ErrorRow(StreamNotRead, "RESOURCE_EXHAUSTED", 408, "invalid_request_error", StatusCode.EXCEED_LIMIT_ERROR),
        ErrorRow(RequestCancelled, "CANCELLED", 499, "server_error", StatusCode.RUNTIME_ERROR),
        ErrorRow(DeadlineExceeded, "DEADLINE_EXCEEDED", 504, "server_error", StatusCode.RUNTIME_ERROR),
        ErrorRow(Unavailable, "UNAVAILABLE", 503, "server_error", StatusCode.REQUEST_DENIED),
        ErrorRow(AlreadyExists, "ALREADY_EXISTS", 409, "invalid_request_error", StatusCode.ILLEGAL_REQUEST_ID),
        ErrorRow(AdapterLoaded, "ALREADY_EXISTS", 400, "invalid_request_error", StatusCode.LORA_ALREADY_LOADED),
        ErrorRow(TooManyAdapters, "RESOURCE_EXHAUSTED", 409, "invalid_request_error", StatusCode.LORA_NUM_EXCEED_LIMIT),
        ErrorRow(AdapterInUse, "RESOURCE_EXHAUSTED", 409, "invalid_request_error", StatusCode.LORA_IN_USE),
        ErrorRow(Unauthenticated, "UNAUTHENTICATED", 401, "invalid_request_error", StatusCode.REQUEST_DENIED),
        ErrorRow(PermissionDenied, "PERMISSION_DENIED", 403, "permission_error", StatusCode.REQUEST_DENIED),
        ErrorRow(InternalError, "INTERNAL", 500, "server_error", StatusCode.UNKNOWN_ERROR),
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
