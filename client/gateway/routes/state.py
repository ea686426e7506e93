"""The endpoints of the server's state: liveness, readiness, version."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from allspan import __version__
from allspan.client.gateway.auth.caller import current_caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Access, Endpoint
from allspan.client.gateway.http.errors import response_of
from allspan.protos.api.errors import Unavailable


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoints of the server's state."""

    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    async def ready() -> Response:
        if context.admission.is_ready:
            return JSONResponse({"status": "ready"})
        told = current_caller().owner or not context.keys.has_users  # it names hosts and processes
        return response_of(Unavailable((told and context.admission.down_cause) or "the engine is not ready"))

    async def version() -> Response:
        return JSONResponse({"version": __version__})

    return [
        Endpoint("GET", "/health", health, "Says that the process answers.", Access.NOTHING),
        Endpoint("GET", "/ready", ready, "Says whether new requests are let in.", Access.NOTHING),
        Endpoint("GET", "/version", version, "Gives the version of allspan."),
    ]
