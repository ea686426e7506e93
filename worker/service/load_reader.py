"""LoadReader: the tokens of experts for a rank's status, which must not wait for a device that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.expert_load import ExpertLoad

TIMEOUT_S = 0.3


class LoadReader:
    """Reads the counts on a thread, one reading at a time."""

    def __init__(self, experts: Callable[[], Sequence[ExpertLoad]]) -> None:
        self._experts = experts
        self._reading: asyncio.Future[Sequence[ExpertLoad]] | None = None
        self._known: list[pb.ExpertLoad] = []

    async def read(self) -> list[pb.ExpertLoad]:
        """The counts now, or those of the last time where they do not come within 0.3 s."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._experts))
        reading = self._reading
        await asyncio.wait({reading}, timeout=TIMEOUT_S)
        if reading.done():
            self._known = [
                pb.ExpertLoad(layer=load.layer, tokens=load.tokens, groups=load.groups) for load in reading.result()
            ]
        return self._known
