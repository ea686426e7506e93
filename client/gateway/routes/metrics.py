"""GET /metrics, for Prometheus: it always answers, and soon, whatever became of the ranks."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from allspan.client.gateway.exposition import Exposition
from allspan.client.gateway.front import Front
from allspan.client.gateway.readers import Scene


def routes(front: Front) -> APIRouter:
    router = APIRouter()
    exposition = Exposition()

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        scene = Scene(front.submitter, await front.glance.look())
        body, content_type = exposition.render(scene, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    return router
