"""Checks for JSON that no request means: a duplicate name, of which one reader takes the first and another the last;
numbers that are none; text with NUL, where some library would end it; and so many small values that parsing them would
delay all other requests."""

from __future__ import annotations

import re

import jiter

from allspan.client.gateway.http.errors import HttpError

SMALL_BYTES = 1 << 18
"""Bytes of a body that are parsed without a check, because any content of that size is parsed quickly."""
MAX_STRINGS = 1 << 16
MAX_ENTRIES = 1 << 20

_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def check_size(body: bytes) -> None:
    """Checks a body before it is parsed. HttpError 400 when it is made of too many pieces; a long text is one."""
    if len(body) <= SMALL_BYTES:
        return
    for what, count, most in (
        ("strings", (body.count(b'"') - body.count(b'\\"')) // 2, MAX_STRINGS),
        ("entries", body.count(b","), MAX_ENTRIES),
    ):
        if count > most:
            raise HttpError(400, f"the body has {count} {what}, at most {most}")


def check_json(body: bytes) -> None:
    """Checks that a body is strict JSON; HttpError 400 with the reason."""
    try:
        jiter.from_json(body, catch_duplicate_keys=True, allow_inf_nan=False, cache_mode="none")
    except ValueError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}") from None
    if b"\\u0000" in body and _ESCAPED_NUL.search(body):
        raise HttpError(400, "the body is not valid JSON for a request: a text has a NUL character (\\u0000)")
