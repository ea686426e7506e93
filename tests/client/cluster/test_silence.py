"""A rank that sends nothing: not ready at once, given up late, and ready again as soon as it is heard."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable

import pytest

from allspan.client.cluster import health, world
from allspan.client.cluster.requests import Session
from allspan.protos.api.errors import Unavailable
from allspan.protos.api.results import ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.tls import NO_TLS, TlsFiles
from support.fake_transport import FakeRanks, FakeSource, FakeTransport

SCALE = 0.1
"""Of the real times."""


class Replicas:
    def __init__(self, count: int, watchdog_timeout: float = 30.0) -> None:
        self.ranks = [FakeRanks(2, name=f"r{i}") for i in range(count)]
        self.sources = [FakeSource(ranks.info(watchdog_timeout=watchdog_timeout)) for ranks in self.ranks]
        self.session = Session(self.sources, self.connect)

    def connect(self, address: str, tls: TlsFiles = NO_TLS) -> FakeTransport:
        return self.ranks[int(address[1])].connect(address)

    async def start(self) -> ResultQueue:
        return await self.session.start(uuid.uuid4().bytes, [1, 2, 3], SamplingParams(max_tokens=2, seed=1))


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((health, "QUIET_S"), (world, "WATCH_S"), (world, "GRACE_S")):
        monkeypatch.setattr(module, name, getattr(module, name) * SCALE)
    monkeypatch.setattr(world, "HEARTBEAT_MS", int(world.HEARTBEAT_MS * SCALE))
    monkeypatch.setattr("allspan.client.cluster.replica.RECONNECT_POLL_S", 0.002)


@pytest.fixture
async def one() -> AsyncIterator[Replicas]:
    made = Replicas(1)
    await made.session.attach(5)
    yield made
    await made.session.close()


async def until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.001)


def test_silence_is_noticed_within_two_seconds() -> None:
    assert (health.QUIET_S + world.WATCH_S) / SCALE < 2.0
    assert world.HEARTBEAT_MS / SCALE / 1000 * 2 < health.QUIET_S / SCALE  # one that is late is no silence


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_silent_rank_is_not_ready_and_ready_again_when_it_is_heard(one: Replicas, rank: int) -> None:
    queue = await one.start()
    one.ranks[0][rank].silent = True
    started = time.monotonic()
    await until(lambda: one.session.down_cause)
    assert time.monotonic() - started < 2.0 * SCALE + 1.0  # and what a busy machine adds
    assert f"rank {rank} (pid {100 + rank} on testhost) has been silent for 0." in one.session.down_cause
    one.ranks[0][rank].silent = False
    await until(lambda: not one.session.down_cause)
    for _ in range(2):
        one.ranks[0].step()
    assert [token for output in [out async for out in queue] for token in output.token_ids] == [4, 5]


async def test_a_new_request_waits_a_moment_for_a_silent_world_and_is_then_refused(
    one: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.ranks[0][1].silent = True
    await until(lambda: one.session.down_cause)
    start = asyncio.create_task(one.start())
    await asyncio.sleep(0.01)
    one.ranks[0][1].silent = False
    await asyncio.wait_for(start, 5)
    monkeypatch.setattr("allspan.client.cluster.router.SILENCE_WAIT_S", 0.05)
    one.ranks[0][1].silent = True
    await until(lambda: one.session.down_cause)
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"rank 1 .* has been silent"):
        await one.start()
    assert time.monotonic() - started < 1.0


async def test_requests_go_on_at_a_replica_that_speaks_and_no_token_is_lost_or_doubled() -> None:
    """Also one that is on its way to a rank that does not answer; the silent ranks are told to stop theirs."""
    two = Replicas(2)
    await two.session.attach(5)
    first = await two.start()
    two.ranks[0].step()
    two.ranks[0][1].silent = True
    await until(lambda: len(two.session.router.ready) == 1)
    assert two.session.down_cause == ""
    await until(lambda: two.ranks[1][0].requests.get("StartRequest"))
    (moved,) = two.ranks[1][0].requests["StartRequest"]
    assert list(moved.output_token_ids) == [4]
    two.ranks[1].step()
    assert [token for output in [out async for out in first] for token in output.token_ids] == [4, 5]
    for _ in range(3):
        await two.start()
    assert [len(ranks[0].requests["StartRequest"]) for ranks in two.ranks] == [1, 4]
    await until(lambda: two.ranks[0][0].requests.get("StopRequest"))
    await two.session.close()


async def test_silence_beyond_the_watchdogs_time_is_death() -> None:
    made = Replicas(1, watchdog_timeout=0.2)
    await made.session.attach(5)
    queue = await made.start()
    made.ranks[0][1].silent = True
    await until(lambda: made.session.down_cause)
    made.sources[0].info = None  # nobody knows more
    with pytest.raises(Unavailable, match=r"rank 1 .* is gone: it sent nothing for 0\.7 s"):
        await queue.aget(5)
    await made.session.close()


async def test_a_silent_world_that_the_supervisor_gives_up_is_lost_at_once(one: Replicas) -> None:
    queue = await one.start()
    one.ranks[0][1].silent = True
    await until(lambda: one.session.down_cause)
    assert not queue.state.is_final
    one.sources[0].info = one.ranks[0].info("down", "rank 1 was silent for 30 s", will_restart=True)
    await until(lambda: one.session.down_cause == "rank 1 was silent for 30 s")
    one.ranks[0].revive()
    one.sources[0].info = one.ranks[0].info()
    await until(lambda: one.ranks[0][0].requests.get("StartRequest"))
    for _ in range(2):
        one.ranks[0].step()
    assert [token for output in [out async for out in queue] for token in output.token_ids] == [4, 5]


async def test_a_client_that_stood_still_itself_does_not_blame_the_ranks() -> None:
    made = Replicas(1, watchdog_timeout=0.1)
    await made.session.attach(5)
    for _ in range(3):
        time.sleep(0.8)  # the whole loop stands, as in a process that was stopped
        await asyncio.sleep(2 * world.WATCH_S)
        assert made.session.down_cause == ""
    await made.session.close()
