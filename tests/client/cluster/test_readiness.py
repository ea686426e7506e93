"""A facade is ready when requests are welcome, not when somebody answers."""

from __future__ import annotations

import asyncio

import pytest

from allspan.client.cluster import health
from allspan.client.cluster import world as world_module
from allspan.client.cluster.requests import Session
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.sampling import SamplingParams
from support.fake_transport import FakeRanks, FakeSource
from support.gateway import eventually

PARAMS = SamplingParams(max_tokens=4, seed=1)
ID = b"r" * 16


async def attached(ranks: FakeRanks) -> Session:
    session = Session([FakeSource(ranks.info())], ranks.connect)
    await session.attach(5.0)
    return session


async def test_a_leader_that_lets_nothing_in_is_not_ready_and_its_reason_is_told() -> None:
    ranks = FakeRanks(2)
    session = await attached(ranks)
    assert session.unready_cause == ""
    ranks[1].stream.put_nowait(pb.StepOutputs(refusal="a follower does not decide"))
    ranks[0].stream.put_nowait(pb.StepOutputs(refusal="the model is stopped"))
    await eventually(lambda: session.unready_cause == "the model is stopped")
    assert session.down_cause == "", "operations reach it, or it could not be started again"
    (replica,) = (await session.view(1.0)).replicas
    assert replica.cause == "the model is stopped"
    ranks[0].stream.put_nowait(pb.StepOutputs())
    await eventually(lambda: session.unready_cause == "")
    await session.close()


async def test_a_step_loop_that_has_work_and_stands_still_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STALL_S", 0.2)
    monkeypatch.setattr(world_module, "HEARTBEAT_MS", 50)
    ranks = FakeRanks(1)
    session = await attached(ranks)
    await asyncio.sleep(0.4)
    assert session.unready_cause == "", "idle, it need not advance"
    await session.start(ID, [1, 2], PARAMS)
    await eventually(lambda: "has work and has not advanced for 0.2 s" in session.unready_cause)
    ranks[0].stream.put_nowait(pb.StepOutputs(progress=7))
    await eventually(lambda: session.unready_cause == "")
    await session.close()


async def test_of_a_cluster_half_of_which_answers_the_view_has_that_half() -> None:
    ranks = FakeRanks(2)
    session = await attached(ranks)
    whole = await session.view(1.0)
    assert whole.statistics is not None
    assert [rank.statistics is not None for rank in whole.replicas[0].ranks] == [True, True]
    ranks[1].replies["Status"] = 60.0
    half = await session.view(0.05)
    assert half.statistics is None
    assert [rank.statistics is not None for rank in half.replicas[0].ranks] == [True, False]
    assert all(rank.heard_s is not None for rank in half.replicas[0].ranks)
    ranks[0].break_stream()
    await eventually(lambda: session.down_cause)
    gone = (await session.view(0.05)).replicas[0]
    assert gone.cause
    assert [rank.heard_s for rank in gone.ranks] == [None, None]
    assert gone.statistics is None
    await session.close()
