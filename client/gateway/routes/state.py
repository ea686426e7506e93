"""What the server says of itself: alive, ready, version."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from allspan import __version__
from allspan.client.gateway.auth.caller import current_caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.errors import response_of
from allspan.protos.api.errors import Unavailable


def routes(context: GatewayContext) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "alive"})

    @router.get("/ready")
    async def ready() -> Response:
        if context.admission.is_ready:
            return JSONResponse({"status": "ready"})
        told = current_caller().owner or not context.keys.has_users  # it names hosts and processes
        return response_of(Unavailable((told and context.admission.down_cause) or "the engine is not ready"))

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    return router
