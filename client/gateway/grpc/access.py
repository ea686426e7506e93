"""Access to the gRPC methods: with keys, every one but the health service requires a key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from allspan.client.gateway.auth.caller import set_caller
from allspan.client.gateway.auth.keys import presented_key
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.grpc.status import shown_message, status_code, trailers_of
from allspan.client.gateway.telemetry.request_context import Origin, plain_label
from allspan.protos.api.errors import ERRORS, AllspanError, Unauthenticated

OPEN_SERVICES = ("/grpc.health.v1.Health/",)


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Identifies the caller of a call before a message is read."""

    def __init__(self, context: GatewayContext) -> None:
        self._keys = context.keys
        self._telemetry = context.telemetry

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if not method.startswith(OPEN_SERVICES):
            given = {name.lower(): value for name, value in handler_call_details.invocation_metadata or ()}
            key = presented_key(_text(given.get("authorization")), _text(given.get("x-api-key")))
            try:
                set_caller(self._keys.caller(key))
            except Unauthenticated as error:
                self._telemetry.refused(Origin(plain_label(f"gRPC {method[1:]}")), error, ERRORS[error.code].grpc)
                return _refusal(error)
        return await continuation(handler_call_details)


def _text(value: str | bytes | None) -> str:
    return value if isinstance(value, str) else ""


def _refusal(error: AllspanError) -> grpc.RpcMethodHandler:
    """Answers a call of any kind at once, whether or not a message comes."""

    async def refuse(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await context.abort(status_code(error), shown_message(error), trailers_of(error))
        yield None  # never reached: what makes this a stream

    return grpc.stream_stream_rpc_method_handler(refuse)
