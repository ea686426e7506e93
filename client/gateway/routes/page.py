"""The built-in web page to chat with the model and to see the cluster: static files of the package that load nothing
from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.responses import Response

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Access, Endpoint

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # The page runs its own files alone, asks its own server alone, and is shown in nobody's frame.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns an endpoint for each file of the page."""
    found = []
    for name, content, media_type in _files():
        path = "/" if name == "index.html" else f"/page/{name}"
        handler = _served(content, media_type)
        found.append(Endpoint("GET", path, handler, "Serves the page.", Access.NOTHING, is_described=False))
    return found


def _files() -> list[tuple[str, bytes, str]]:
    """(name, content, media type) of all there are, read once."""
    folder = files("allspan.client.gateway") / "page"
    return [
        (entry.name, entry.read_bytes(), media_type)
        for entry in folder.iterdir()
        if (media_type := _TYPES.get("." + entry.name.rpartition(".")[2]))
    ]


def _served(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return file
