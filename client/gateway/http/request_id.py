"""Records every HTTP request at its arrival, and counts its answer.

X-Request-Id: the caller's is echoed, a missing one is made up.
"""

from __future__ import annotations

import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allspan.client.gateway.telemetry.recorder import Telemetry
from allspan.client.gateway.telemetry.request_context import plain_name

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
OTHER = "other"
"""The label for values that a caller can make up: paths without a route, unknown methods."""


class RequestIds:
    """ASGI middleware, the outermost; touches nothing but the start of a response."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = plain_name(Headers(scope=scope).get("x-request-id", "")) or uuid.uuid4().hex
        scope.setdefault("state", {}).update(arrived=time.monotonic(), request_id=name)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
                self._telemetry.answers[(*_place(scope), message["status"])] += 1
            await send(message)

        await self._app(scope, receive, send_named)


def _place(scope: Scope) -> tuple[str, str]:
    """Method and path, as the route names it: few, whatever callers send."""
    method = scope["method"] if scope["method"] in METHODS else OTHER
    return method, getattr(scope.get("route"), "path", OTHER)
