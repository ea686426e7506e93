"""The gRPC servers: a service, health and reflection on one port each, in the clear or as TLS."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from allspan.client.gateway.auth.tls import Pem, Tls
from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.grpc.access import KeyInterceptor
from allspan.client.gateway.grpc.health import EngineHealth
from allspan.client.gateway.grpc.reflection import add_reflection
from allspan.client.gateway.grpc.service import SERVICE, InferenceService
from allspan.client.gateway.sockets import Sockets
from allspan.protos import inference_pb2
from allspan.protos.api.errors import ConfigError
from allspan.protos.convert import SERVER_OPTIONS

CLOSE_S = 1.0
KEEPALIVE_TIMEOUT_S = 20


@dataclass(frozen=True)
class Front:
    """One gRPC port: the services on it, and the files that reflection shows."""

    address: str
    held: socket.socket
    """Holds the port until the server listens."""
    services: Mapping[str, Mapping[str, grpc.RpcMethodHandler]]
    """Handlers by the service's full name and the method's."""
    files: Sequence[FileDescriptor]
    packages: Mapping[str, str] = field(default_factory=dict)
    """Packages that reflection shows under another name."""


def inference_front(context: GatewayContext, sockets: Sockets) -> Front:
    """Returns the front of --grpc-port."""
    services = {SERVICE: InferenceService(context).handlers()}
    return Front(sockets.grpc_address, sockets.grpc, services, (inference_pb2.DESCRIPTOR,))


@contextlib.asynccontextmanager
async def grpc_server(
    context: GatewayContext, health: EngineHealth, front: Front, tls: Tls | None
) -> AsyncIterator[None]:
    """Serves inside the block. ConfigError when it cannot listen."""
    server = grpc.aio.server(options=_options(context.config), interceptors=(KeyInterceptor(context),))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, dict(handlers)) for name, handlers in front.services.items()]
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    add_reflection(server, (*front.files, health_pb2.DESCRIPTOR), front.packages)
    try:
        if tls is None:
            server.add_insecure_port(front.address)
        else:
            server.add_secure_port(front.address, _credentials(tls))
    except RuntimeError as error:
        raise ConfigError(f"gRPC cannot listen on {front.address}: {error}") from error
    await health.refresh()
    await server.start()
    front.held.close()
    try:
        yield
    finally:
        await server.stop(CLOSE_S)


def _options(gateway: GatewayConfig) -> list[tuple[str, Any]]:
    config = gateway.grpc
    options = dict(SERVER_OPTIONS) | {
        "grpc.so_reuseport": 1,
        "grpc.max_allowed_incoming_connections": config.grpc_max_connections,
        "grpc.server_handshake_timeout_ms": int(1000 * gateway.limits.header_timeout),  # of TLS, and of HTTP/2
        "grpc.max_receive_message_length": config.grpc_max_message_bytes,
        # A stream can be silent for long (a queue, a long prompt), so clients may ask whether it still lives.
        "grpc.http2.min_ping_interval_without_data_ms": int(1000 * config.grpc_min_ping_interval),
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.keepalive_time_ms": int(1000 * config.grpc_keepalive_time),
        "grpc.keepalive_timeout_ms": 1000 * KEEPALIVE_TIMEOUT_S,
    }
    if config.grpc_max_connection_age:
        options["grpc.max_connection_age_ms"] = int(1000 * config.grpc_max_connection_age)
    return list(options.items())


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """Returns the server's credentials, read at every handshake, so that a renewed certificate takes effect."""

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.ca or None)

    shown = tls.pem

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if tls.pem is shown:
            return None
        shown = tls.pem
        return configuration(shown)

    return grpc.dynamic_ssl_server_credentials(configuration(shown), fetch, tls.requires_clients)
