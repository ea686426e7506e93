"""The stream of KV events for routers: what the prefix cache holds, and the load with it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import grpc

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.vllm_worker.kv_journal import KvJournal
from allspan.client.gateway.vllm_worker.loads import Load, engine_load, present_load
from allspan.protos import vllm_worker_pb2 as pb

LOOK_S = 0.25
"""Seconds between two looks at the load; a changed one is sent at once."""
HEARTBEAT_S = 1.0
"""Seconds after which an unchanged load is sent again."""


class KvStream:
    """One subscription."""

    def __init__(self, context: GatewayContext, journal: KvJournal, request: pb.SubscribeKvEventsRequest) -> None:
        self._context = context
        self._journal = journal
        self._start = request.start_sequence_number
        self._last = 0
        """The number that this stream has sent last, 0 before the first."""
        self._loads_first = request.load_records_before_first_batch
        self._told: Load | None = None
        self._sample = 0
        self._due = 0.0
        self.failure: tuple[grpc.StatusCode, str] | None = None
        """Why the stream cannot go on; the subscriber is to begin anew from 0."""
        if self._start and not journal.reaches(self._start):
            self.failure = (
                grpc.StatusCode.OUT_OF_RANGE,
                f"start_sequence_number is {self._start}, which this server did not send or keeps no more: begin at 0, "
                "which gives what is cached now",
            )

    async def batches(self) -> AsyncGenerator[pb.KvEventBatch, None]:
        """Yields what is cached now or what came after the given number, then what comes, with the load in between."""
        self._journal.start()
        if not self._start:
            position = self._journal.last
            for chunk in self._journal.snapshot():
                yield await self._with_load(chunk)
        else:
            position = self._start
        while self._journal.reaches(position):
            for batch in self._journal.after(position):
                position = batch.sequence_number
                yield await self._with_load(batch)
            load = await present_load(self._context)
            is_new = load != self._told or time.monotonic() >= self._due
            if is_new and (self._last or self._loads_first):  # others take the first number that they see for a batch's
                record = self._record(load, load_only=True)
                yield pb.KvEventBatch(sequence_number=self._last, timestamp=time.time(), dp_rank=0, load=record)
            if position == self._journal.last:
                await self._journal.news(LOOK_S)
        self.failure = (grpc.StatusCode.DATA_LOSS, "the stream was read too slowly: what comes next is kept no more")

    async def _with_load(self, batch: pb.KvEventBatch) -> pb.KvEventBatch:
        self._last = batch.sequence_number
        stamped = pb.KvEventBatch()
        stamped.CopyFrom(batch)
        stamped.load.CopyFrom(self._record(await present_load(self._context), load_only=False))
        return stamped

    def _record(self, load: Load, load_only: bool) -> pb.EngineLoad:
        self._told, self._sample, self._due = load, self._sample + 1, time.monotonic() + HEARTBEAT_S
        return engine_load(load, self._sample, load_only)
