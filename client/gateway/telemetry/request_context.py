"""The origin of a request: its endpoint, arrival time, caller and names. Its log lines tell it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.requests import Request

from allspan.client.gateway.auth.caller import current_caller

_PLAIN = re.compile(r"[!-~]{1,128}")
_LABEL = "".join(map(chr, range(0x20, 0x7F)))
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


@dataclass(eq=False, slots=True)
class Origin:
    """One call from outside, HTTP or gRPC, made before anything of it is read: its times count from there. The choices
    of a request share one."""

    label: str
    """The endpoint that was called: "POST /v1/completions", "gRPC allspan.v1.Inference/Generate"."""
    name: str = ""
    """The caller's name for it; in HTTP, the X-Request-Id that is sent back, too."""
    traceparent: str = ""
    """Its traceparent (W3C Trace Context), if it has a valid one."""
    arrived: float = field(default_factory=time.monotonic)
    """The arrival time on the monotonic clock."""
    owner: str = field(default_factory=lambda: current_caller().owner)
    """The owner name of its caller (`caller.Caller.owner`)."""
    cache_key: bytes = field(default_factory=lambda: current_caller().cache_key, repr=False)
    """The secret of its caller that keeps its cached prefixes apart (`caller.Caller.cache_key`)."""
    is_aborted: bool = False
    """Whether another call has ended it; its parts that have not started need not start."""
    is_admitted: bool = False
    """Whether its requests were admitted: each of them then records its own end."""

    @property
    def trace_id(self) -> str:
        """The trace id of its traceparent: 32 hexadecimal digits, or ""."""
        return self.traceparent.split("-")[1] if self.traceparent else ""


def origin_of(request: Request) -> Origin:
    """The one of an HTTP request; always the same. `RequestIds` has noted when it came."""
    state = request.scope.setdefault("state", {})
    if "origin" not in state:
        state["origin"] = Origin(
            plain_label(f"{request.method} {request.scope['path']}"),
            state.get("request_id", ""),
            traceparent(request.headers),
            state.get("arrived") or time.monotonic(),
        )
    origin: Origin = state["origin"]
    return origin


def traceparent(headers: Mapping[str, str]) -> str:
    """Returns the traceparent header if it is valid, else ""."""
    given = headers.get("traceparent", "").strip()
    match = _TRACEPARENT.fullmatch(given)
    return given if match and match[1].strip("0") else ""


def plain_label(text: str) -> str:
    """Returns the call's label for a log line: it stays one line, whatever text the caller sent."""
    return quote(text[:200], safe=_LABEL)


def plain_name(text: str) -> str:
    """A caller's name as it may stand in a log line: printable and short, else ""."""
    return text if _PLAIN.fullmatch(text) else ""
