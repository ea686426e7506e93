"""A request's body, within its limits of size and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import ClientDisconnect, Request

from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.http.errors import HttpError
from allspan.protos.api.errors import RequestCancelled

UNREAD_S = 2.0
"""Seconds for which the rest of a body that is too large is still received, so that its sender reads the answer."""


async def read_json_body(request: Request, limits: LimitsConfig, any_type: bool = False) -> bytes:
    """Returns the body of a request, not parsed yet. HttpError: 415 for another type than JSON, 413 too large, 408 too
    slow.

    `any_type`: JSON may come as another type (curl's default), except from a browser's page, which has an Origin: a
    page of another site can send such types without asking.
    """
    kind = request.headers.get("content-type", "")
    is_free = any_type and "origin" not in request.headers
    if not is_free and kind.partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, f"Content-Type is {kind[:64]!r}, must be application/json")
    limit = limits.max_body_bytes
    length = request.headers.get("content-length", "")
    too_large = length.isdecimal() and int(length) > limit
    body = bytearray()
    chunks = request.stream()
    try:
        async with asyncio.timeout(limits.body_timeout):
            while not too_large and (chunk := await anext(chunks, None)) is not None:
                body += chunk
                too_large = len(body) > limit
        if too_large:
            await _discard(chunks, 4 * limit)
            raise HttpError(413, f"the body is larger than {limit} bytes, the limit of this server")
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {limits.body_timeout:g} s") from None
    except ClientDisconnect:
        raise RequestCancelled("the client went away") from None
    return bytes(body)


async def _discard(chunks: AsyncGenerator[bytes, None], limit: int) -> None:
    """Reads on for a while without keeping anything: a connection that is closed on its sender loses the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(UNREAD_S):
            while limit > 0 and (chunk := await anext(chunks, None)) is not None:
                limit -= len(chunk)
