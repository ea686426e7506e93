"""The operator's endpoints, under the names that vLLM's users know: for the admin key alone."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.admission.admission import Hold
from allspan.client.gateway.auth.caller import current_caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.body import read_json_body
from allspan.client.gateway.http.endpoint import Access, Endpoint
from allspan.protos.api.errors import AllspanError, InvalidRequest

DRAIN_S, WEIGHTS_S, MOST_S = 60.0, 600.0, 3600.0

Act = Callable[[Request], Awaitable[dict[str, Any]]]

logger = logging.getLogger("allspan.gateway")


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the operator's endpoints."""
    return [
        Endpoint(method, path, _endpoint(path, act), summary, Access.ADMIN)
        for method, path, act, summary in _table(_Operator(context))
    ]


def _endpoint(path: str, act: Act) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        started = time.monotonic()
        try:
            answer = await act(request)
        except AllspanError as error:
            logger.info("admin: %s failed after %.3f s: %s", path, time.monotonic() - started, error.message)
            raise
        if request.method == "POST":
            logger.info("admin: %s done in %.3f s", path, time.monotonic() - started)
        return JSONResponse(answer)

    endpoint.__name__ = act.__name__
    return endpoint


def _table(operator: _Operator) -> list[tuple[str, str, Act, str]]:
    return [
        ("POST", "/pause", operator.pause, "Lets no new requests in and waits for those that run."),
        ("POST", "/resume", operator.resume, "Lets new requests in again."),
        ("GET", "/is_paused", operator.is_paused, "Says whether the server is paused or asleep."),
        ("POST", "/sleep", operator.sleep, "Pauses, and gives back the memory of weights and KV pages."),
        ("POST", "/wake_up", operator.wake_up, "Loads the weights again and lets new requests in."),
        ("GET", "/is_sleeping", operator.is_sleeping, "Says whether the weights are unloaded."),
        ("POST", "/reset_prefix_cache", operator.reset_prefix_cache, "Forgets every cached page."),
        ("POST", "/rebalance_experts", operator.rebalance_experts, "Spreads experts over the ranks by their load."),
        ("POST", "/start_profile", operator.start_profile, "Begins to time every op."),
        ("POST", "/stop_profile", operator.stop_profile, "Ends the timing of ops."),
        ("GET", "/profile", operator.profile, "Gives what each op took."),
        ("POST", "/abort", operator.abort, "Ends a running request."),
        ("GET", "/admin/requests", operator.requests, "Lists the requests that run."),
    ]


class _Operator:
    """The operator's endpoints, one for each method; each returns its result as JSON."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._engine = context.engine
        self._limits = context.config.limits

    async def pause(self, request: Request) -> dict[str, Any]:
        """Refuses what is new and waits `timeout` seconds for what runs; then 504, and paused all the same."""
        timeout = _seconds(request, DRAIN_S)
        self._pause()
        await self._engine.acontrol("stop_model", timeout)
        return {"status": "paused"}

    async def resume(self, request: Request) -> dict[str, Any]:
        await self._engine.acontrol("start_model")  # refused while the weights are unloaded
        self._context.admission.hold = Hold.NONE
        return {"status": "running"}

    async def is_paused(self, request: Request) -> dict[str, Any]:
        return {"is_paused": self._context.admission.hold is not Hold.NONE}

    async def sleep(self, request: Request) -> dict[str, Any]:
        """Pauses, then gives back the memory of weights and KV pages. vLLM's levels 1 and 2 are the same here."""
        timeout = _seconds(request, DRAIN_S)
        self._pause()
        await self._engine.acontrol("stop_model", timeout)
        await self._engine.acontrol("unload_weights", timeout)
        self._context.admission.hold = Hold.ASLEEP
        return {"status": "sleeping"}

    async def wake_up(self, request: Request) -> dict[str, Any]:
        timeout = _seconds(request, WEIGHTS_S)
        if self._context.admission.hold is Hold.ASLEEP:
            # Stopped it is already, unless the ranks were started anew meanwhile.
            await self._engine.acontrol("stop_model", DRAIN_S)
            await self._engine.acontrol("reload_weights", timeout)
            self._context.admission.hold = Hold.PAUSED
        return await self.resume(request)

    async def is_sleeping(self, request: Request) -> dict[str, Any]:
        return {"is_sleeping": self._context.admission.hold is Hold.ASLEEP}

    def _pause(self) -> None:
        if self._context.admission.hold is Hold.NONE:
            self._context.admission.hold = Hold.PAUSED

    async def reset_prefix_cache(self, request: Request) -> dict[str, Any]:
        await self._engine.acontrol("reset_prefix_cache")
        return {"status": "reset"}

    async def rebalance_experts(self, request: Request) -> dict[str, Any]:
        """Requests go on meanwhile; 504 after `timeout` seconds, when some layers have moved and others have not."""
        await self._engine.acontrol("rebalance_experts", _seconds(request, WEIGHTS_S))
        return {"status": "rebalanced"}

    async def start_profile(self, request: Request) -> dict[str, Any]:
        await self._engine.acontrol("start_profile")
        return {"status": "profiling"}

    async def stop_profile(self, request: Request) -> dict[str, Any]:
        await self._engine.acontrol("stop_profile")
        return {"status": "stopped"}

    async def profile(self, request: Request) -> dict[str, Any]:
        """Milliseconds of each op on the leader since the start of the profile, the longest first."""
        return await self._engine.ainspect("profile")

    async def abort(self, request: Request) -> dict[str, Any]:
        """{"request_id": …}: the name a request came with, or its answer's id. How many choices that ended."""
        name = _request_id(await read_json_body(request, self._limits))
        return {"aborted": await self._context.admission.abort(name, current_caller())}

    async def requests(self, request: Request) -> dict[str, Any]:
        """Returns the running requests, the oldest first, without prompt and output."""
        now = time.monotonic()
        running = [
            {
                "id": generation.handle.request_id,
                "name": generation.origin.name,
                "owner": generation.origin.owner,
                "call": generation.origin.label,
                "age_s": round(now - generation.origin.arrived, 3),
                "prompt_tokens": generation.num_prompt_tokens,
                "output_tokens": generation.num_output_tokens,
            }
            for generation in self._context.admission.running_requests()
        ]
        return {"requests": sorted(running, key=lambda row: -row["age_s"])}


def _seconds(request: Request, default: float) -> float:
    """The query's `timeout`."""
    text = request.query_params.get("timeout", str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MOST_S:
        raise InvalidRequest(f"timeout is {text[:32]!r}, must be from 0 to {MOST_S:g} seconds", "timeout")
    return seconds


def _request_id(body: bytes) -> str:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None
    name = given.get("request_id") if isinstance(given, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest('the body must be {"request_id": "…"}', "request_id")
    return name
