"""HEAD: the answer to GET without its body (RFC 9110, section 9.3.2); load balancers and link checkers send it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """ASGI middleware that has GET endpoints answer HEAD, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send(dict(message, body=b"") if message["type"] == "http.response.body" else message)

        await self._app(dict(scope, method="GET"), receive, without_body)
