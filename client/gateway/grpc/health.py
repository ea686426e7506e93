"""grpc.health.v1 that follows the engine: NOT_SERVING while its world is down or the gateway drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio

POLL_S = 0.1

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class EngineHealth(aio.HealthServicer):  # type: ignore[misc]
    """The health service: Check asks the engine itself; Watch reports a change within POLL_S."""

    def __init__(self, is_ready: Callable[[], bool], services: tuple[str, ...]) -> None:
        super().__init__()
        self._is_ready = is_ready
        self._services = services
        self._server_status.clear()

    async def refresh(self) -> None:
        """Sends the watchers the present state."""
        status = SERVING if self._is_ready() else NOT_SERVING
        for service in self._services:
            if self._server_status.get(service) != status:
                await self.set(service, status)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> Any:
        await self.refresh()
        if request.service not in self._services:
            known = ", ".join(map(repr, self._services))
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service is {request.service[:64]!r}, must be one of {known}"
            )
        return await super().Check(request, context)

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_S)
