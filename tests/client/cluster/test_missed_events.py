"""A client that has missed page events asks the leader to tell all its pages again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from allspan.client.cluster.requests import Session
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import Unavailable
from support.fake_transport import FakeRanks, FakeSource


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_pages_are_asked_for_again_after_page_events_were_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allspan.client.cluster.world.ASK_PAGES_S", 0.01)
    keys = range(1, 5)
    ranks = FakeRanks(1)
    session = Session([FakeSource(ranks.info())], ranks.connect)
    await session.attach(5)
    leader = ranks[0]

    def tell(sequence: int) -> None:
        stored = [pb.PageStored(key=key) for key in keys]
        events = pb.PageEvents(sequence=sequence, cleared=not sequence, stored=stored, page_tokens=32)
        events.weights_version = 1
        leader.stream.put_nowait(pb.StepOutputs(page_events=[events]))

    async def answer(message: pb.ResendPagesRequest) -> None:
        if len(leader.requests["ResendPages"]) < 2:
            raise Unavailable("for a moment")
        tell(0)

    leader.replies["ResendPages"] = answer
    known = session.router.replicas[0].knowledge
    tell(0)
    await until(lambda: len(known) == 4)
    tell(2)
    await until(lambda: "ResendPages" in leader.requests)
    assert not known.is_told
    await until(lambda: len(known) == 4)
    (subscription,) = leader.requests["Results"]
    assert [asked.client_id for asked in leader.requests["ResendPages"]] == [subscription.client_id] * 2
    await session.close()
