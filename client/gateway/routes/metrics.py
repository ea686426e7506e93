"""GET /metrics, for Prometheus: it always answers, and soon, whatever became of the ranks."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.metrics.collect import Scene
from allspan.client.gateway.metrics.exposition import Exposition


def routes(context: GatewayContext) -> APIRouter:
    router = APIRouter()
    exposition = Exposition()

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        scene = Scene(context, await context.snapshots.look())
        body, content_type = exposition.render(scene, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    return router
