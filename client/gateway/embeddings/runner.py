"""Runs requests whose results are vectors, many together, for HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from allspan.client.gateway.admission.admission import Admission, Job
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos.api.errors import QueueFull
from allspan.protos.api.results import RequestTimings

MOST_AT_ONCE = 256
"""Requests of one call that are in the engine together."""
PAUSE_S = 0.05
"""Wait of a request that found the queue full, while others of its call run."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of one request."""

    vector: bytes
    """Little-endian float32."""
    num_tokens: int
    timings: RequestTimings


class VectorRunner:
    """One call: all of its requests, or the first one's error."""

    def __init__(self, context: GatewayContext, jobs: Sequence[Job], origin: Origin) -> None:
        self._admission: Admission = context.admission
        self._jobs = jobs
        self._origin = origin
        self._results: list[Pooled | None] = [None] * len(jobs)
        self._num_running = 0

    async def run(self) -> list[Pooled]:
        """Returns the results in the order of the jobs. When it is cancelled or one fails, the others are stopped."""
        waiting = iter(range(len(self._jobs)))
        width = min(len(self._jobs), MOST_AT_ONCE, max(1, self._admission.most_open // 2))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(width):
                    group.create_task(self._work(waiting))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [result for result in self._results if result is not None]

    async def _work(self, waiting: Iterator[int]) -> None:
        for place in waiting:
            while self._results[place] is None:
                try:
                    self._results[place] = await self._one(self._jobs[place])
                except QueueFull:
                    if not self._num_running:
                        raise
                    await asyncio.sleep(PAUSE_S)

    async def _one(self, job: Job) -> Pooled:
        async with self._admission.running([job], self._origin) as (request,):
            self._num_running += 1
            try:
                async with aclosing(request.deltas()) as deltas:
                    async for _ in deltas:
                        pass
            finally:
                self._num_running -= 1
            return Pooled(request.vector, request.num_prompt_tokens, request.timings)
