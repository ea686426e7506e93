"""A cache of the cluster's snapshot, 0.2 s old at most, for metrics, `GET /cluster` and the log."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from allspan.client.cluster.snapshot import ClusterView
from allspan.client.gateway.engine_protocol import GatewayEngine
from allspan.protos.api.errors import AllspanError

TIMEOUT_S = 0.8
"""Seconds that ranks have to answer; a snapshot leaves out those that did not."""
FRESH_S = 0.2
"""Seconds for which a snapshot is returned again."""
MARGIN_S = 0.4

logger = logging.getLogger("allspan.gateway")


@dataclass(frozen=True, slots=True)
class Seen:
    """A view, and when it was complete on the monotonic clock."""

    view: ClusterView
    at: float


class SnapshotCache:
    """A cache of cluster snapshots, used on the gateway's loop. Callers at the same time share one look."""

    def __init__(self, engine: GatewayEngine) -> None:
        self._engine = engine
        self._last = Seen(ClusterView(), float("-inf"))
        self._looking: asyncio.Task[None] | None = None

    async def look(self) -> ClusterView:
        """The cluster as it is now; an empty snapshot when nothing could be learnt in time."""
        if time.monotonic() - self._last.at > FRESH_S:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)
        return self._last.view

    async def _look(self) -> None:
        view = ClusterView()
        try:
            async with asyncio.timeout(TIMEOUT_S + MARGIN_S):
                view = await self._engine.aview(TIMEOUT_S)
        except (AllspanError, TimeoutError) as error:
            logger.debug("the cluster cannot be seen: %r", error)
        self._last = Seen(view, time.monotonic())
