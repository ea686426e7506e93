"""Random plays of starts, steps, deaths and restarts: every admitted stream has exactly its tokens."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allspan.client.cluster.requests import ResumePolicy
from allspan.protos.api.errors import Unavailable
from allspan.protos.api.results import ResultQueue
from support.fake_transport import counted
from support.mortal_cluster import MortalCluster, tokens_of

pytestmark = pytest.mark.usefixtures("fast_polls")


Event = tuple[str, int]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("kill"), st.integers(0, 1)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("breathe"), st.integers(1, 5)),
    ),
    max_size=40,
)


class Play:
    """Random events on one cluster, and the streams that were begun meanwhile."""

    def __init__(self) -> None:
        self.cluster = MortalCluster(ResumePolicy(max_tries=1000))
        self.starts: list[tuple[int, asyncio.Task[tuple[bytes, ResultQueue]]]] = []
        self.is_up = True

    async def event(self, what: str, number: int) -> None:
        if what == "start" and not self.cluster.session.down_cause:
            self.starts.append((number, asyncio.create_task(self.cluster.start(number))))
        elif what == "kill" and self.is_up:
            self.cluster.kill(number)
            self.is_up = False
        elif what == "restart" and not self.is_up:
            self.cluster.restart()
            self.is_up = True
        for _ in range(number):
            if what == "step":
                self.cluster.ranks.step()
            if what == "breathe":
                await asyncio.sleep(0.0005)

    async def end(self) -> None:
        """Every stream that was admitted has exactly its tokens."""
        await self.event("restart", 0)
        results = await asyncio.gather(*(start for _, start in self.starts), return_exceptions=True)
        queues = [result[1] for result in results if not isinstance(result, BaseException)]
        assert all(isinstance(result, (tuple, Unavailable)) for result in results)  # some came to a world that was gone
        lengths = [n for (n, _), result in zip(self.starts, results, strict=True) if isinstance(result, tuple)]
        while not all(queue.state.is_final for queue in queues):
            self.cluster.ranks.step()
            await asyncio.sleep(0.001)
        for length, queue in zip(lengths, queues, strict=True):
            assert await tokens_of(queue) == [counted([3], i) for i in range(length)]
        assert self.cluster.session.queues() == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS)
def test_whatever_dies_when_every_stream_is_whole(events: list[Event]) -> None:
    async def run() -> None:
        play = Play()
        async with asyncio.timeout(20):
            await play.cluster.session.attach(5)
            for event in events:
                await play.event(*event)
            await play.end()
            await play.cluster.session.close()

    asyncio.run(run())
