"""Errors as gRPC's clients read them: a status, trailers, and the details of google.rpc (AIP-193)."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from google.rpc import status_pb2

from allspan.client.gateway.admission.admission import RETRY_AFTER_S
from allspan.protos.api.errors import ERRORS, AllspanError, InvalidRequest, ModelNotFound, QueueFull, Unavailable

DOMAIN = "allspan"
DETAILS = "grpc-status-details-bin"
MAX_MESSAGE_CHARS = 1024
"""A message stands in the trailers twice; clients take 8 KiB of them."""

Trailers = tuple[tuple[str, str | bytes], ...]


def status_code(error: AllspanError) -> grpc.StatusCode:
    return grpc.StatusCode[ERRORS[error.code].grpc]


def shown_message(error: AllspanError) -> str:
    """Returns the message as one line that fits in the trailers."""
    text = error.message.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 1]}…"


def trailers_of(error: AllspanError, request_id: str = "") -> Trailers:
    """The details, and the code, the field and the time to wait as plain text; never a traceback."""
    message = shown_message(error)
    status = status_pb2.Status(
        code=status_code(error).value[0], message=message, details=_packed(error, message, request_id)
    )
    trailers: list[tuple[str, str | bytes]] = [
        ("allspan-error-code", error.code),
        (DETAILS, status.SerializeToString()),
    ]
    if isinstance(error, InvalidRequest) and error.field:
        trailers.append(("allspan-error-field", error.field.encode("ascii", "replace").decode()))
    if isinstance(error, QueueFull):
        trailers.append(("retry-after", str(RETRY_AFTER_S)))
    if _is_passing(error):
        trailers.append(("grpc-retry-pushback-ms", str(1000 * RETRY_AFTER_S)))
    return tuple(trailers)


def _packed(error: AllspanError, message: str, request_id: str) -> Sequence[Any]:
    parts: list[Message] = [details.ErrorInfo(reason=error.code.upper(), domain=DOMAIN)]
    if isinstance(error, InvalidRequest):
        violation = details.BadRequest.FieldViolation(field=error.field or "", description=message)
        parts.append(details.BadRequest(field_violations=[violation]))
    if isinstance(error, ModelNotFound):
        parts.append(details.ResourceInfo(resource_type="model", description=message))
    if _is_passing(error):
        retry = details.RetryInfo()
        retry.retry_delay.seconds = RETRY_AFTER_S
        parts.append(retry)
    if request_id:
        parts.append(details.RequestInfo(request_id=request_id))
    packed = [Any() for _ in parts]
    for box, part in zip(packed, parts, strict=True):
        box.Pack(part)
    return packed


def _is_passing(error: AllspanError) -> bool:
    """The same request may be taken a little later."""
    return isinstance(error, (QueueFull, Unavailable))
