"""The built-in web page to chat with the model and to see the cluster: static files of the package that load nothing
from elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Access, Endpoint

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "mjs": "text/javascript",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
    "txt": "text/plain",
}
_HEADERS = {
    # The page runs its own files alone, asks its own server alone, and is shown in nobody's frame. Where the browser
    # knows trusted types, no text becomes elements except through the sanitiser.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_REFERENCE_HEADERS = _HEADERS | {
    # Redoc writes its styles into the page; what it shows is this server's own description.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoints of the page and of its files."""
    known = dict(_files(files("allspan.client.gateway") / "page"))

    async def page(request: Request) -> Response:
        return _served(known["index.html"], request)

    async def reference(request: Request) -> Response:
        return _served(known["docs/index.html"], request, _REFERENCE_HEADERS)

    async def file(name: str, request: Request) -> Response:
        if name not in known:
            raise HTTPException(404)
        return _served(known[name], request)

    return [
        Endpoint("GET", "/", page, "Serves the page.", Access.NOTHING, is_described=False),
        Endpoint("GET", "/docs", reference, "Serves the reference of this API.", Access.NOTHING, is_described=False),
        Endpoint("GET", "/page/{name:path}", file, "Serves a file of the page.", Access.NOTHING, is_described=False),
    ]


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, _File]]:
    """Yields each file below the folder by its path in it."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif media_type := _TYPES.get(entry.name.rpartition(".")[2]):
            content = entry.read_bytes()
            yield prefix + entry.name, _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _served(file: _File, request: Request, headers: Mapping[str, str] = _HEADERS) -> Response:
    headers = {**headers, "ETag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
