"""Logs one line each 10 s about the cluster as a whole, while it has something to do."""

from __future__ import annotations

import asyncio
import logging
import time

from allspan.client.gateway.snapshot_cache import SnapshotCache
from allspan.protos.api.engine import EngineStatistics

PERIOD_S = 10.0

logger = logging.getLogger("allspan.gateway")


class StatusLine:
    """The periodic log line, run on the gateway's loop."""

    def __init__(self, snapshots: SnapshotCache, period_s: float = PERIOD_S) -> None:
        self._snapshots = snapshots
        self._period_s = period_s

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        before, at = (await self._snapshots.look()).statistics, time.monotonic()
        while True:
            await asyncio.sleep(self._period_s)
            now, then = (await self._snapshots.look()).statistics, time.monotonic()
            if now is not None and before is not None and (line := status(before, now, then - at)):
                logger.info("%s", line)
            before, at = now, then


def status(before: EngineStatistics, now: EngineStatistics, seconds: float) -> str:
    """Returns the line about the time between two snapshots; "" when nothing happened."""
    prompt = max(now.prompt_tokens - before.prompt_tokens, 0)
    generated = max(now.generated_tokens - before.generated_tokens, 0)
    if not (now.running or now.waiting or prompt or generated):
        return ""
    looked_up = now.prefix_query_tokens - before.prefix_query_tokens
    hit = f"{100 * (now.prefix_hit_tokens - before.prefix_hit_tokens) / looked_up:.0f} %" if looked_up > 0 else "-"
    return (
        f"running: {now.running} reqs, waiting: {now.waiting}, KV {100 * now.kv_usage:.1f} %, prefix hit {hit}, "
        f"prompt {prompt / seconds:,.0f} tok/s, gen {generated / seconds:,.0f} tok/s"
    )
