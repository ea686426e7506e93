"""The stream of KV events for routers: what the prefix cache holds, and the load with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.vllm_worker.loads import engine_load, present_load
from allspan.protos import vllm_worker_pb2 as pb

LOOK_S = 0.25
"""Seconds between two looks at the load; a changed one is sent at once."""
HEARTBEAT_S = 1.0
"""Seconds after which an unchanged load is sent again."""


async def load_batches(context: GatewayContext) -> AsyncGenerator[pb.KvEventBatch, None]:
    """Yields batches that carry the load alone, for as long as they are read."""
    told, sample, due = None, 0, 0.0
    while True:
        load = await present_load(context)
        if load != told or time.monotonic() >= due:
            told, sample, due = load, sample + 1, time.monotonic() + HEARTBEAT_S
            yield pb.KvEventBatch(timestamp=time.time(), dp_rank=0, load=engine_load(load, sample, load_only=True))
        await asyncio.sleep(LOOK_S)
