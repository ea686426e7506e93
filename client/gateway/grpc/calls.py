"""What the handlers of every gRPC service share: parsing, names of running calls, errors as statuses, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from allspan.client.gateway.admission.admission import caller_error
from allspan.client.gateway.auth.caller import Caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.grpc.status import shown_message, status_code, trailers_of
from allspan.client.gateway.telemetry.request_context import Origin, plain_name, traceparent
from allspan.protos.api.errors import AlreadyExists, InvalidRequest, StreamNotRead

_NAME = re.compile(r"[!-~]{1,128}")

Request = TypeVar("Request", bound=Message)


class Calls:
    """The running calls of one service, `service` by its full name, and the handlers around its methods."""

    def __init__(self, context: GatewayContext, service: str) -> None:
        self._context = context
        self._service = service
        self._running: set[Origin] = set()
        """The running calls that have a request id."""

    def origin(self, method: str, request_id: str, context: grpc.aio.ServicerContext) -> Origin:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        return Origin(f"gRPC {self._service}/{method}", plain_name(request_id), traceparent=traceparent(metadata))

    def unary(
        self, name: str, method: Callable[[Request], Awaitable[Message]], kind: type[Request]
    ) -> grpc.RpcMethodHandler:
        """Returns the handler of a method that needs its message alone."""

        async def handle(request: Request | None, context: grpc.aio.ServicerContext) -> Message:
            try:
                reply = await method(parsed(request, kind))
            except Exception as error:
                await self.refuse(context, self.origin(name, "", context), error)
            self._context.telemetry.grpc_calls[name, "OK"] += 1
            return reply

        return grpc.unary_unary_rpc_method_handler(handle, leniently(kind), _serialized)

    def timed(self, name: str, method: Callable[..., Awaitable[Message]], kind: type[Request]) -> grpc.RpcMethodHandler:
        """Returns the handler of a method that runs requests: it knows its call, and the time that this leaves."""

        async def handle(request: Request | None, context: grpc.aio.ServicerContext) -> Message:
            origin = self.origin(name, "", context)
            try:
                reply = await method(self._context, parsed(request, kind), origin, context.time_remaining())
            except Exception as error:
                await self.refuse(context, origin, error)
            self._context.telemetry.grpc_calls[name, "OK"] += 1
            return reply

        return grpc.unary_unary_rpc_method_handler(handle, leniently(kind), _serialized)

    def streaming(
        self,
        name: str,
        method: Callable[[Request, Origin, grpc.aio.ServicerContext], Awaitable[None]],
        kind: type[Request],
    ) -> grpc.RpcMethodHandler:
        """Returns the handler of a method that writes its answers one by one."""

        async def handle(request: Request | None, context: grpc.aio.ServicerContext) -> None:
            origin = self.origin(name, getattr(request, "request_id", ""), context)
            try:
                await method(parsed(request, kind), origin, context)
            except Exception as error:
                await self.refuse(context, origin, error)
            self._context.telemetry.grpc_calls[name, "OK"] += 1

        return grpc.unary_stream_rpc_method_handler(handle, leniently(kind), _serialized)

    async def write(self, context: grpc.aio.ServicerContext, response: Message) -> None:
        """Waits while the client does not read and gRPC's window is full; what comes meanwhile is merged behind it."""
        limit = self._context.config.grpc.grpc_stream_timeout
        await asyncio.sleep(0)  # after all that a step brought is ready: what is sent at one go wakes readers less
        try:
            async with asyncio.timeout(limit):
                await context.write(response)
        except TimeoutError:
            raise StreamNotRead(f"the stream was not read for {limit:g} s (--grpc-stream-timeout)") from None

    @contextlib.contextmanager
    def named(self, origin: Origin, request_id: str) -> Iterator[None]:
        """Registers a call under its request id; AlreadyExists while another call of the same caller has it;
        InvalidRequest for an invalid one."""
        if not request_id:
            yield
            return
        if not _NAME.fullmatch(request_id):
            raise InvalidRequest(
                f"request_id is {request_id[:64]!r} ({len(request_id)} characters), must be 1 to 128 printable ASCII "
                "characters without spaces",
                "request_id",
            )
        if any(call.name == request_id and call.owner == origin.owner for call in self._running):
            raise AlreadyExists(f"request_id {request_id} is running already; give each request a name of its own")
        self._running.add(origin)
        try:
            yield
        finally:
            self._running.discard(origin)

    async def abort(self, request_id: str, caller: Caller) -> int:
        """Ends the calls of this name, also those that are not admitted yet; returns the number of choices ended."""
        for origin in self._running:
            if origin.name == request_id and caller.may_end(origin.owner):
                origin.is_aborted = True
        return await self._context.admission.abort(request_id, caller)

    async def refuse(self, context: grpc.aio.ServicerContext, origin: Origin, error: Exception) -> NoReturn:
        """Ends the call with the status of the errors table; see `grpc_status`."""
        shown = caller_error(error, origin.label)
        code = status_code(shown)
        telemetry = self._context.telemetry
        telemetry.refused(origin, shown, code.name)
        telemetry.grpc_calls[origin.label.rpartition("/")[2], code.name] += 1
        await context.abort(code, shown_message(shown), trailers_of(shown, origin.name))
        raise AssertionError("abort returns never")


def leniently(kind: type[Request]) -> Callable[[bytes], Request | None]:
    """Returns a parser that gives None for invalid bytes, so that the handler can report it; gRPC alone would answer
    INTERNAL."""

    def parse(data: bytes) -> Request | None:
        message: Request = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return None
        return message

    return parse


def parsed(request: Request | None, kind: type[Request]) -> Request:
    """Returns the request; InvalidRequest for bytes that were none."""
    if request is None:
        raise InvalidRequest(f"the message is no {kind.DESCRIPTOR.full_name}: its bytes cannot be parsed")
    return request


def _serialized(message: Message) -> bytes:
    return bytes(message.SerializeToString())
