"""SubscribeKvEvents as a router reads it: what is cached, what changes, and what it missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest

from allspan.client.gateway.vllm_worker.kv_journal import KvJournal
from allspan.protos import vllm_worker_pb2 as pb
from allspan.protos import worker_pb2
from support.gateway import eventually, fake_engine, gateway
from support.worker_client import WorkerClient

HIGH = 2**64 - 1


ADAPTED = worker_pb2.PageStored(key=11, token_ids=[1, 2], medium="GPU", lora_id=1)
"""A page of an adapter: it is left out, since the contract cannot tell it from one of the model."""


def page(key: int, parent: int = 0, medium: str = "GPU") -> worker_pb2.PageStored:
    return worker_pb2.PageStored(key=key, parent=parent, token_ids=[key % 100, 2], medium=medium)


TOLD = (
    worker_pb2.PageEvents(cleared=True, page_tokens=2, stored=[page(HIGH), page(7, HIGH), page(9), ADAPTED]),
    worker_pb2.PageEvents(sequence=1, page_tokens=2, removed=[7, 1234, 11], stored=[page(9, medium="CPU")]),
)


def plain(batch: pb.KvEventBatch) -> list[tuple[object, ...]]:
    """Each event as its kind, its hashes, and the parent and tier."""
    told: list[tuple[object, ...]] = []
    for event in batch.events:
        if event.HasField("stored"):
            hashes = [block.block_hash for block in event.stored.blocks]
            told.append(("stored", hashes, event.stored.parent_block_hash, event.stored.tier))
        elif event.HasField("removed"):
            told.append(("removed", list(event.removed.block_hashes), event.removed.tier))
        else:
            told.append(("cleared",))
    return told


FIRST = [("cleared",), ("stored", [-1, 7], 0, 1), ("stored", [9], 0, 1)]
SECOND = [("removed", [7, 9], 1), ("stored", [9], 0, 2)]
NOW = [("cleared",), ("stored", [-1], 0, 1), ("stored", [9], 0, 2)]


async def read(client: WorkerClient, count: int, start: int = 0, loads: bool = False) -> list[pb.KvEventBatch]:
    request = pb.SubscribeKvEventsRequest(start_sequence_number=start, load_records_before_first_batch=loads)
    call = client.SubscribeKvEvents(request, timeout=10)
    found = [await call.read() for _ in range(count)]
    call.cancel()
    return found


async def test_a_subscriber_is_told_what_is_cached_what_it_missed_and_the_load() -> None:
    async with (
        gateway(fake_engine(pages=TOLD), worker_port=0) as server,
        grpc.aio.insecure_channel(server.worker_address) as channel,
    ):
        client = WorkerClient(channel)
        first, second, heartbeat = await read(client, 3)
        assert (plain(first), plain(second)) == (FIRST, SECOND)
        assert second.sequence_number == first.sequence_number + 1
        assert [list(block.token_ids) for block in first.events[1].stored.blocks] == [[HIGH % 100, 2], [7, 2]]
        assert {block.block_size for block in first.events[1].stored.blocks} == {2}
        assert (first.load.load_only, heartbeat.load.load_only) == (False, True)
        assert heartbeat.sequence_number == second.sequence_number
        (now,) = await read(client, 1)
        assert (plain(now), now.sequence_number) == (NOW, second.sequence_number)
        assert (now.snapshot.index, now.snapshot.count, now.snapshot.blocks) == (0, 1, 2)
        (missed,) = await read(client, 1, start=first.sequence_number)
        assert plain(missed) == SECOND
        for unknown in (1, first.sequence_number - 2, second.sequence_number + 1):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(client, 1, start=unknown)
            assert caught.value.code() == grpc.StatusCode.OUT_OF_RANGE
            assert f"start_sequence_number is {unknown}" in (caught.value.details() or "")


async def test_loads_come_before_the_first_batch_to_those_who_take_them() -> None:
    async with (
        gateway(worker_port=0) as server,
        grpc.aio.insecure_channel(server.worker_address) as channel,
    ):
        (load,) = await read(WorkerClient(channel), 1, loads=True)
    assert (load.sequence_number, load.load.load_only, load.load.sample) == (0, True, 1)


async def test_a_page_is_stored_with_its_first_replica_and_removed_with_its_last() -> None:
    queues = [asyncio.Queue[worker_pb2.PageEvents]() for _ in range(2)]

    async def source(queue: asyncio.Queue[worker_pb2.PageEvents]) -> AsyncGenerator[worker_pb2.PageEvents, None]:
        while True:
            yield await queue.get()

    async with KvJournal(lambda: [source(queue) for queue in queues], most_batches=2) as journal:
        journal.start()
        start = journal.last
        told: list[list[tuple[object, ...]]] = []
        for replica, events in (
            (0, worker_pb2.PageEvents(page_tokens=2, stored=[page(1), page(2, 1)])),
            (1, worker_pb2.PageEvents(page_tokens=2, stored=[page(1), page(3)])),
            (0, worker_pb2.PageEvents(page_tokens=2, cleared=True)),
            (1, worker_pb2.PageEvents(page_tokens=2, removed=[1])),
        ):
            number = journal.last
            queues[replica].put_nowait(events)
            await eventually(lambda number=number: journal.last > number)
            told += [plain(batch) for batch in journal.after(number)]
        assert told == [
            [("stored", [1, 2], 0, 1)],
            [("stored", [3], 0, 1)],
            [("removed", [2], 1)],
            [("removed", [1], 1)],
        ]
        assert not journal.reaches(start + 1)
        assert journal.reaches(start + 2)
        assert [plain(chunk) for chunk in journal.snapshot()] == [[("cleared",), ("stored", [3], 0, 1)]]
