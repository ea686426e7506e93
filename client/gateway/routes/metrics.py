"""GET /metrics, for Prometheus: it always answers, and soon, whatever became of the ranks."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Access, Endpoint
from allspan.client.gateway.metrics.collect import Scene
from allspan.client.gateway.metrics.exposition import Exposition


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoint of the metrics."""
    exposition = Exposition()

    async def metrics(request: Request) -> Response:
        scene = Scene(context, await context.snapshots.look())
        body, content_type = exposition.render(scene, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    access = Access.NOTHING if context.config.security.open_metrics else Access.KEY
    texts = ("text/plain", "application/openmetrics-text")
    return [Endpoint("GET", "/metrics", metrics, "Gives samples for Prometheus.", access, media_types=texts)]
