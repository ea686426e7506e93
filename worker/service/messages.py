"""From the wire's messages to the engine's values, checked: a rank trusts no sender."""

from __future__ import annotations

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import NO_ADAPTER
from allspan.protos.api.errors import InvalidRequest, ModelNotFound, Unavailable
from allspan.protos.convert import options_from_wire, sampling_from_wire
from allspan.worker.scheduler.request import Request

MAX_REQUEST_IDS = 65536


def request_from_wire(message: pb.StartRequestMessage, model: str, epoch: int) -> Request:
    """Raises Unavailable (another epoch's facade), ModelNotFound or InvalidRequest naming the field. Limits that depend
    on the model, and the adapter, are the engine's to check."""
    if message.epoch != epoch:
        raise Unavailable(f"this world is epoch {epoch}, the request is for epoch {message.epoch}; attach again")
    if message.model not in ("", model):
        raise ModelNotFound(f"model is {message.model!r}, this cluster serves {model!r}")
    check_request_id(message.request_id)
    if not message.sampling:
        raise InvalidRequest("sampling is missing", "sampling")
    return Request(
        request_id=message.request_id,
        client_id=message.client_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        params=sampling_from_wire(message.sampling),
        options=options_from_wire(message),
        adapter=message.adapter_digest if message.adapter else NO_ADAPTER,
        num_resumed=len(message.output_token_ids),
        output_token_ids=list(message.output_token_ids),
    )


def check_request_id(request_id: bytes) -> None:
    if len(request_id) != 16:
        raise InvalidRequest(f"request_id has {len(request_id)} bytes, must have 16", "request_id")


def request_ids_from_wire(message: pb.RequestIds) -> tuple[bytes, ...]:
    if len(message.request_ids) > MAX_REQUEST_IDS:
        raise InvalidRequest(
            f"request_ids has {len(message.request_ids)} entries, at most {MAX_REQUEST_IDS}", "request_ids"
        )
    for request_id in message.request_ids:
        check_request_id(request_id)
    return tuple(message.request_ids)
