"""Checks which web pages may send requests: by default the server's own alone, also when another host name leads to
this machine."""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.errors import HttpError, response_of
from allspan.client.gateway.telemetry.request_context import origin_of
from allspan.protos.cluster.tls import is_loopback

EXPOSED = ("Retry-After", "X-Request-Id")
METHODS = ("GET", "POST", "DELETE")


class HostCheck:
    """ASGI middleware against DNS rebinding: a page of evil.example whose name is changed to resolve to 127.0.0.1 has
    the same origin as this server for its browser, but the Host header still has evil.example.

    Only where that would be enough to get in: without keys, on loopback.
    """

    def __init__(self, app: ASGIApp, context: GatewayContext) -> None:
        self._app = app
        self._telemetry = context.telemetry
        self._names = frozenset(name.lower() for name in context.config.security.allowed_hosts)
        self._checks = is_loopback(context.config.host) and not context.keys.has_users

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._checks and scope["type"] == "http":
            host = host_name(Headers(scope=scope).get("host", ""))
            if not (is_harmless(host) or host in self._names):
                error = HttpError(
                    403,
                    f"Host is {host[:100]!r}, which this server does not go by on loopback; --allowed-hosts lets in "
                    "a name that a proxy keeps",
                )
                self._telemetry.refused(origin_of(Request(scope)), error, 403)
                await response_of(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Wraps the application so that pages of these origins can read the answers. No cookies: keys come in a header that
    a page must know."""
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=METHODS, allow_headers=("*",), expose_headers=EXPOSED, max_age=600
    )


def host_name(header: str) -> str:
    """Returns the host without the port and an IPv6 address's brackets, in lower case."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and ":" in host else host


def is_harmless(host: str) -> bool:
    """Returns whether no attacker's DNS name can be meant: an address, localhost, a bare name (or none, which no
    browser sends)."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(".localhost")
    return True
