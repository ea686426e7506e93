"""Checks of a request's head that the parser leaves to the server (RFC 9112): one valid Host, one transfer coding, a
target without a fragment, a version that is spoken here."""

from __future__ import annotations

import ipaddress
import re

from allspan.client.gateway.http.errors import HttpError

VERSIONS = ("1.0", "1.1")
MAX_PORT = 65535

_AUTHORITY = re.compile(
    rb"(?:\[(?P<ip>[0-9A-Fa-f:.]+)\]|(?:[A-Za-z0-9._~-]|%[0-9A-Fa-f]{2})*)(?::(?P<port>[0-9]{0,5}))?"
)
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)(?:[/?].*)?", re.IGNORECASE | re.DOTALL)

Headers = list[tuple[bytes, bytes]]


def check_head(version: str, method: bytes, target: bytes, headers: Headers) -> None:
    """HttpError 400 when the head must be refused. `headers`: lower-case names; a target with a host replaces Host."""
    if version not in VERSIONS:
        raise HttpError(400, f"the HTTP version is {version}, must be 1.0 or 1.1")
    if method == b"CONNECT":
        raise HttpError(400, "the method is CONNECT, which only a proxy takes")
    _check_coding(version, [value for name, value in headers if name == b"transfer-encoding"])
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise HttpError(400, f"the request has {len(hosts)} Host headers, must have one")
    if not hosts and version != "1.0":
        raise HttpError(400, "the request has no Host header, HTTP/1.1 requires one")
    if hosts and not is_authority(hosts[0]):
        raise HttpError(400, f"Host is {_shown(hosts[0])}, must be a name or an address, and a port after a colon")
    if (host := _target_host(method, target)) is not None:
        headers[:] = [(b"host", host), *(header for header in headers if header[0] != b"host")]


def without_upgrade(version: str, method: bytes, target: bytes, headers: Headers) -> bytes:
    """Returns a request's head that asks for no other protocol; the parser reads no body of one that does."""
    lines = [method + b" " + target + b" HTTP/" + version.encode()]
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(t for t in value.split(b",") if t.strip().lower() in (b"close", b"keep-alive"))
        if name != b"upgrade":
            lines.append(name + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def is_authority(value: bytes) -> bool:
    """Returns whether a text is HOST or HOST:PORT (RFC 3986), an IPv6 address in brackets."""
    match = _AUTHORITY.fullmatch(value)
    if match is None or int(match["port"] or 0) > MAX_PORT:
        return False
    if match["ip"] is None:
        return True
    try:
        ipaddress.IPv6Address(match["ip"].decode())
    except ValueError:
        return False
    return True


def _check_coding(version: str, codings: list[bytes]) -> None:
    if not codings:
        return
    if version == "1.0":
        raise HttpError(400, "the request has a Transfer-Encoding header, which HTTP/1.0 does not know")
    if len(codings) > 1 or codings[0].strip().lower() != b"chunked":
        raise HttpError(400, f"Transfer-Encoding is {_shown(b', '.join(codings))}, must be chunked")


def _target_host(method: bytes, target: bytes) -> bytes | None:
    """Returns the host of a target in absolute form, None of one without. HttpError 400 for what is no target."""
    if b"#" in target:
        raise HttpError(400, "the request's target has a fragment (#), which no server is sent")
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return None
    match = _ABSOLUTE.fullmatch(target)
    if match is None or not match[1].strip(b":") or not is_authority(match[1]):
        raise HttpError(400, f"the request's target is {_shown(target)}, must be a path or an http URL")
    return match[1]


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
