"""The HTTP side: all routes as one FastAPI application, and what they share: errors and request ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from allspan import __version__
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.access import KeyCheck, require_admin
from allspan.client.gateway.http.endpoint import Access, Endpoint
from allspan.client.gateway.http.errors import HttpError, response_of, status_of
from allspan.client.gateway.http.head import HeadAsGet
from allspan.client.gateway.http.origin import HostCheck, with_cors
from allspan.client.gateway.http.request_id import RequestIds
from allspan.client.gateway.openapi.document import describe
from allspan.client.gateway.routes import (
    adapters,
    admin,
    anthropic,
    cluster,
    embeddings,
    llama_server,
    metrics,
    ollama,
    openai,
    page,
    responses,
    state,
    tokens,
)
from allspan.client.gateway.telemetry.recorder import Telemetry
from allspan.client.gateway.telemetry.request_context import origin_of
from allspan.protos.api.errors import AllspanError

ROUTES: tuple[Callable[[GatewayContext], list[Endpoint]], ...] = (
    openai.endpoints,
    responses.endpoints,
    anthropic.endpoints,
    ollama.endpoints,
    llama_server.endpoints,
    embeddings.endpoints,
    tokens.endpoints,
    state.endpoints,
    cluster.endpoints,
    metrics.endpoints,
    page.endpoints,
    admin.endpoints,
    adapters.endpoints,
)


def make_app(context: GatewayContext) -> FastAPI:
    """Returns the application with all of ROUTES over one gateway."""
    app = FastAPI(title="allspan", version=__version__, docs_url=None, redoc_url=None)
    endpoints = [endpoint for make in ROUTES for endpoint in make(context)]
    for endpoint in endpoints:
        app.add_api_route(
            endpoint.path,
            endpoint.handler,
            methods=[endpoint.method],
            summary=endpoint.summary,
            dependencies=[Depends(require_admin)] if endpoint.access is Access.ADMIN else None,
            include_in_schema=endpoint.is_described,
        )
    describe(app, context, endpoints)
    app.add_exception_handler(AllspanError, _refusal(context.telemetry))
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_middleware(KeyCheck, context=context, endpoints=endpoints)
    app.add_middleware(HeadAsGet)
    if origins := context.config.security.allowed_origins:
        app.add_middleware(with_cors, origins)
    app.add_middleware(HostCheck, context=context)
    app.add_middleware(RequestIds, telemetry=context.telemetry)
    return app


def _refusal(telemetry: Telemetry) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, AllspanError)
        telemetry.refused(origin_of(request), error, status_of(error))
        return response_of(error, request.url.path)

    return refused


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    what = f"{request.method} {path}"
    paths = [getattr(route, "path", "") for route in request.app.routes]
    messages = {
        404: f"{what}: no such endpoint{base_url_hint(path, paths)}",
        405: f"{what}: this endpoint does not take {request.method}",
    }
    message = messages.get(error.status_code, f"{what}: {error.detail}")
    response = response_of(HttpError(error.status_code, message), path)
    response.headers.update(error.headers or {})
    return response


def base_url_hint(path: str, known: Iterable[str]) -> str:
    """Returns what is wrong with the base URL of a client that asks for `path`; "" where no endpoint can be meant."""
    for other in sorted(known, key=len, reverse=True):
        short = other.removeprefix("/v1")
        if len(short) > 1 and path != other and path.endswith(short):
            extra = path.removesuffix(other).removesuffix(short)
            way = f"must not contain {extra}" if path.endswith(other) else "must end in /v1"
            return f"; it is {other}: the client's base URL {way}"
    return ""
