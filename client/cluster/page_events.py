"""The page events of every replica's leader, read over streams of their own and read again when a world is new."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable

from allspan.client.transport.base import RESULTS, Connect
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import AllspanError
from allspan.protos.cluster.cluster_file import ClusterInfo

HEARTBEAT_MS = 250
RETRY_S = 0.5
WITH_TOKEN_IDS = 2
"""See `ResultsSubscription.page_events`."""

logger = logging.getLogger(__name__)


async def page_events(world: Callable[[], ClusterInfo | None], connect: Connect) -> AsyncGenerator[pb.PageEvents, None]:
    """Yields them for as long as they are read; the first of each world is `cleared`. `world`: the replica's present
    one."""
    while True:
        info = world()
        if info is not None and info.ranks:
            transport = connect(info.ranks[0].address, info.tls)
            asked = pb.ResultsSubscription(
                client_id=uuid.uuid4().hex, heartbeat_ms=HEARTBEAT_MS, page_events=WITH_TOKEN_IDS
            )
            try:
                async for message in transport.stream(RESULTS, asked):
                    for events in message.page_events:
                        yield events
            except AllspanError as error:
                logger.debug("the page events of a replica ended: %s", error.message)
            finally:
                await transport.close()
        await asyncio.sleep(RETRY_S)
