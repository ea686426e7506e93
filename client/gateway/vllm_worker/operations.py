"""The operator's methods of the worker front: flushing the prefix cache, and profiles."""

from __future__ import annotations

import asyncio
import time

from allspan.client.gateway.auth.caller import current_caller
from allspan.client.gateway.context import GatewayContext
from allspan.protos import vllm_worker_pb2 as pb
from allspan.protos.api.errors import InvalidRequest, PermissionDenied

MOST_S = 3600.0
POLL_S = 0.05


class Operations:
    """The methods, for the admin key alone where any key is set; without keys, for whoever reaches the port."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def flush_cache(self, request: pb.FlushCacheRequest) -> pb.FlushCacheResponse:
        """Forgets every cached page; with a timeout, as soon as no request runs. Running requests keep their pages."""
        self._check_caller("FlushCache")
        if not 0 <= request.timeout_s <= MOST_S:
            raise InvalidRequest(f"timeout_s is {request.timeout_s:g}, must be from 0 to {MOST_S:g}", "timeout_s")
        end = time.monotonic() + request.timeout_s
        while self._context.admission.num_open and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        await self._context.engine.acontrol("reset_prefix_cache")
        return pb.FlushCacheResponse(success=True, message="the prefix cache is empty")

    async def start_profile(self, request: pb.StartProfileRequest) -> pb.ProfileResponse:
        self._check_caller("StartProfile")
        if given := [descriptor.name for descriptor, _ in request.ListFields()]:
            raise InvalidRequest(f"{given[0]} is not supported: a profile has no options here; leave it out", given[0])
        await self._context.engine.acontrol("start_profile")
        return pb.ProfileResponse(success=True, message="every op is timed; GET /profile gives what each took")

    async def stop_profile(self, request: pb.StopProfileRequest) -> pb.ProfileResponse:
        self._check_caller("StopProfile")
        await self._context.engine.acontrol("stop_profile")
        return pb.ProfileResponse(success=True, message="ops are no longer timed; GET /profile gives what each took")

    def _check_caller(self, method: str) -> None:
        keys = self._context.keys
        if (keys.has_users or keys.has_admin) and not current_caller().is_admin:
            raise PermissionDenied(f"{method} needs the admin key (--admin-api-key-file)")
