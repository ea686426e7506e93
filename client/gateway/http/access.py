"""Access to the HTTP paths: once there are keys, every path but a few requires one."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from allspan.client.gateway.auth.caller import ANYONE, check_admin, set_caller
from allspan.client.gateway.auth.keys import presented_key
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Access, Endpoint
from allspan.client.gateway.http.errors import response_of
from allspan.client.gateway.telemetry.request_context import origin_of
from allspan.protos.api.errors import Unauthenticated

OPEN_PREFIX = "/page/"
"""The prefix of the page's files, which need no key; other paths below it are not found, with a key or without."""


class KeyCheck:
    """ASGI middleware that identifies the caller of a request and refuses all others. Whatever is no endpoint needs a
    key."""

    def __init__(self, app: ASGIApp, context: GatewayContext, endpoints: Iterable[Endpoint]) -> None:
        self._app = app
        self._keys = context.keys
        self._telemetry = context.telemetry
        access = {endpoint.path: endpoint.access for endpoint in endpoints}
        self._open = frozenset(path for path, asks in access.items() if asks is Access.NOTHING)
        self._admin_paths = frozenset(path for path, asks in access.items() if asks is Access.ADMIN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        headers = Headers(scope=scope)
        key = presented_key(headers.get("authorization", ""), headers.get("x-api-key", ""))
        is_open = path in self._open or path.startswith(OPEN_PREFIX)
        try:
            set_caller(self._keys.caller(key, is_admin_call=path in self._admin_paths))
        except Unauthenticated as error:
            set_caller(ANYONE)  # a connection's earlier request may have left another
            if not is_open:
                response = response_of(error, path)
                response.headers["WWW-Authenticate"] = "Bearer"
                self._telemetry.refused(origin_of(Request(scope)), error, response.status_code)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def require_admin() -> None:
    """A dependency of the admin endpoints. PermissionDenied with the way out."""
    check_admin()
