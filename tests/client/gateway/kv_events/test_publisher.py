"""KV events as a subscriber written for vLLM's releases reads them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from allspan.client.gateway.config import KvEventsConfig
from allspan.client.gateway.kv_events.batches import KvEvents
from allspan.client.gateway.kv_events.publisher import check_endpoints, of_replica, published
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import ConfigError
from support.gateway import fake_engine, gateway

HIGH = 2**64 - 1


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """The base of the events, as in vLLM's example of a subscriber."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def page(key: int, parent: int = 0, medium: str = "GPU") -> pb.PageStored:
    return pb.PageStored(key=key, parent=parent, token_ids=[key % 100, 2], medium=medium)


TOLD = (
    pb.PageEvents(cleared=True, page_tokens=2, stored=[page(HIGH), page(7, HIGH), page(9)]),
    pb.PageEvents(sequence=1, page_tokens=2, removed=[7, 1234], stored=[page(9, medium="CPU")]),
)
EVENTS = [
    [
        AllBlocksCleared(),
        BlockStored([HIGH, 7], None, [HIGH % 100, 2, 7, 2], 2, None, "GPU"),
        BlockStored([9], None, [9, 2], 2, None, "GPU"),
    ],
    [BlockRemoved([7, 9], "GPU"), BlockStored([9], None, [9, 2], 2, None, "CPU")],
]


async def replayed(socket: Any) -> list[tuple[int, bytes]]:
    """Sequence numbers and payloads from 0 on, the end marker included."""
    await socket.send_multipart((b"", (0).to_bytes(8, "big")))
    found: list[tuple[int, bytes]] = []
    while not found or found[-1][0] != -1:
        assert await socket.poll(5000)
        _, sequence, payload = await socket.recv_multipart()
        found.append((int.from_bytes(sequence, "big", signed=True), payload))
    return found


async def test_a_subscriber_of_vllm_reads_the_events_and_asks_for_those_that_it_missed(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    context: Any = zmq.asyncio.Context()
    live, missed = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    live.setsockopt(zmq.SUBSCRIBE, b"kv@")
    live.connect(endpoint)
    try:
        settings = {"kv_events_endpoint": endpoint, "kv_events_replay_endpoint": replay, "kv_events_topic": "kv@a@tiny"}
        async with gateway(fake_engine(pages=TOLD), **settings):
            missed.connect(replay)
            found: list[tuple[int, bytes]] = []
            while len(found) < 1 + len(EVENTS):  # the first request may come before the events
                found = await replayed(missed)
            with contextlib.suppress(zmq.Again):  # whoever is there in time gets them without asking
                topic, *_ = await live.recv_multipart(zmq.NOBLOCK)
                assert topic == b"kv@a@tiny"
    finally:
        context.destroy(linger=0)
    assert [sequence for sequence, _ in found] == [0, 1, -1]
    batches = [msgspec.msgpack.decode(payload, type=Batch) for _, payload in found[:-1]]
    assert [batch.events for batch in batches] == EVENTS
    assert {batch.data_parallel_rank for batch in batches} == {0}


async def test_an_endpoint_that_cannot_be_bound_is_named_before_anything_is_published(tmp_path: Path) -> None:
    (tmp_path / "replay_dp1").mkdir()
    begun: list[int] = []

    async def source(replica: int) -> AsyncGenerator[pb.PageEvents, None]:
        begun.append(replica)
        yield pb.PageEvents(cleared=True, page_tokens=2)

    config = KvEventsConfig(f"ipc://{tmp_path}/events", kv_events_replay_endpoint=f"ipc://{tmp_path}/replay")
    with pytest.raises(ConfigError, match="--kv-events-replay-endpoint of replica 1 cannot be bound"):
        async with published(config, [source(0), source(1)]):
            raise AssertionError("it was bound")
    await asyncio.sleep(0)
    assert not begun


def test_a_page_of_an_adapter_is_told_with_its_number() -> None:
    stored = [page(7), page(9)]
    stored[1].lora_id = 2
    _, plain, adapted = KvEvents().of(pb.PageEvents(cleared=True, page_tokens=2, stored=stored))
    assert (plain[5], adapted[5]) == (None, 2)


def test_maps_have_a_type_and_the_names_of_the_fields() -> None:
    events = KvEvents("maps")
    cleared, stored, _ = events.of(TOLD[0])
    assert cleared == {"type": "AllBlocksCleared"}
    assert stored["type"] == "BlockStored"
    assert stored["block_hashes"] == [HIGH, 7]
    assert events.of(TOLD[1])[0] == {"type": "BlockRemoved", "block_hashes": [7, 9], "medium": "GPU"}
    assert events.batch(1.5, [cleared], 3) == {"ts": 1.5, "events": [cleared], "data_parallel_rank": 3}


def test_each_replica_has_an_endpoint_of_its_own() -> None:
    assert [of_replica("tcp://127.0.0.1:5557", replica) for replica in (0, 1)] == [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5558",
    ]
    assert of_replica("ipc:///run/kv", 1) == "ipc:///run/kv_dp1"


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://10.0.0.1:5557", "5557"])
def test_an_address_that_others_reach_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events-endpoint is "):
        check_endpoints(KvEventsConfig(kv_events_endpoint=endpoint), is_insecure=False)
    check_endpoints(KvEventsConfig(kv_events_endpoint="tcp://*:5557"), is_insecure=True)
