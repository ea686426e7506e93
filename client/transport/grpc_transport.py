"""`Transport` over grpc.aio: one channel a rank. The one place where gRPC's errors become ours.

Imported when an engine first connects, so that importing the client (and forking after that) leaves gRPC alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc
import grpc.aio

from allspan.client.transport.base import Method, Reply, Request
from allspan.protos.api.errors import AllspanError, ConfigError, InvalidRequest, Unavailable, from_code, from_grpc
from allspan.protos.cluster.tls import NO_TLS, TlsFiles, is_loopback
from allspan.protos.convert import CHANNEL_OPTIONS

SERVICE = "allspan.worker.v1.Worker"
CLOSED = "the connection is closed"

_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    # A channel of its own: no state (such as reconnection back-off) shared with another engine of this process.
    ("grpc.use_local_subchannel_pool", 1),
    # A peer whose machine vanished is noticed between messages too; servers allow no shorter interval unasked.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class GrpcTransport:
    """The gRPC transport to one rank, made and used on one running asyncio loop."""

    def __init__(self, address: str, tls: TlsFiles = NO_TLS) -> None:
        """ConfigError: see `Connect`."""
        self._channel = _channel(address, tls)
        self._is_closed = False

    async def unary(self, method: Method[Request, Reply], request: Request, timeout: float) -> Reply:
        """Unavailable also once this is closed, for calls that are under way then as well."""
        if self._is_closed:
            raise Unavailable(CLOSED)
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method.name}",
            request_serializer=method.request.SerializeToString,  # type: ignore[attr-defined]
            response_deserializer=method.reply.FromString,  # type: ignore[attr-defined]
        )
        try:
            return cast(Reply, await call(request, timeout=timeout))
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from None
        except asyncio.CancelledError:
            # A channel that is closed cancels its calls, which looks as if their callers had been cancelled.
            task = asyncio.current_task()
            if not self._is_closed or (task is not None and task.cancelling()):
                raise
            raise Unavailable(CLOSED) from None

    async def stream(self, method: Method[Request, Reply], request: Request) -> AsyncIterator[Reply]:
        multicall = self._channel.unary_stream(
            f"/{SERVICE}/{method.name}",
            request_serializer=method.request.SerializeToString,  # type: ignore[attr-defined]
            response_deserializer=method.reply.FromString,  # type: ignore[attr-defined]
        )
        call = multicall(request)
        try:
            async for message in call:
                yield cast(Reply, message)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        self._is_closed = True
        await self._channel.close()


def _translated(error: grpc.aio.AioRpcError) -> AllspanError:
    """A rank's own errors carry their code (and a bad field's name) as trailing metadata; others have a status only."""
    details = " ".join((error.details() or "no details").split())
    told = dict(error.trailing_metadata() or ())
    code, field = (_text(told.get(key, "")) for key in ("allspan-code", "allspan-field"))
    if code == InvalidRequest.code:
        return InvalidRequest(details, field or None)
    if code:
        return from_code(code, details)
    # A server that ends cancels its calls. This side's own cancelling raises CancelledError, and does not come here.
    is_end = error.code() is grpc.StatusCode.CANCELLED
    return Unavailable(details) if is_end else from_grpc(error.code().name, details)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def connect(address: str, tls: TlsFiles = NO_TLS) -> GrpcTransport:
    return GrpcTransport(address, tls)


def _channel(address: str, tls: TlsFiles) -> grpc.aio.Channel:
    if address.startswith("unix"):
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    if not tls.is_given:
        host = address.rpartition(":")[0].removeprefix("ipv4:").removeprefix("ipv6:").strip("[]")
        if not is_loopback(host):
            raise ConfigError(f"{address} is on another host, which is reached with TLS only: give tls=TlsFiles(…)")
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    ca, certificate, key = tls.read()
    options: list[tuple[str, int | str]] = list(_OPTIONS)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=options)
