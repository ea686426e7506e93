"""X-Request-Id: the caller's is echoed, a missing one is made up."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PLAIN = re.compile(r"[!-~]{1,128}")


def name_of(request: Request) -> str:
    """The request's X-Request-Id, given or made up."""
    return str(request.state.request_id)


class RequestIds:
    """ASGI middleware; touches nothing but the start of a response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _PLAIN.fullmatch(given) else uuid.uuid4().hex

        scope.setdefault("state", {})["request_id"] = name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        await self._app(scope, receive, send_named)
