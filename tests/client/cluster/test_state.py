"""The states of a replica: only transitions of the table happen, and the queries follow from state and cause."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allspan.client.cluster.requests import ResumePolicy
from allspan.client.cluster.state import TRANSITIONS, IllegalTransition, ReplicaState, ReplicaStatus
from support.mortal_cluster import KILLED, MortalCluster

STATES = st.sampled_from(ReplicaState)


@given(st.lists(st.tuples(STATES, st.sampled_from([None, "", "a cause"])), max_size=30))
def test_a_walk_takes_the_tables_transitions_and_refuses_all_others(
    walk: list[tuple[ReplicaState, str | None]],
) -> None:
    changes: list[ReplicaState] = []
    status = ReplicaStatus(lambda: changes.append(status.state))
    for state, cause in walk:
        before = (status.state, status.cause)
        seen = len(changes)
        wanted = status.cause if cause is None else cause
        allowed = state is status.state or state in TRANSITIONS[status.state]
        if allowed and bool(wanted) is (state is not ReplicaState.READY):
            assert status.move(state, cause) is (state is not before[0])
            assert (status.state, status.cause) == (state, wanted)
        else:
            with pytest.raises(IllegalTransition):
                status.move(state, cause)
            assert (status.state, status.cause) == before
            assert len(changes) == seen
        assert bool(status.down_cause) is not status.state.takes_requests
        assert not status.state.takes_requests or status.state.has_world
        assert not status.state.has_world or status.state.may_return


def test_closed_is_final_and_every_other_state_can_be_closed() -> None:
    assert TRANSITIONS[ReplicaState.CLOSED] == frozenset()
    assert all(ReplicaState.CLOSED in following for state, following in TRANSITIONS.items() if following)
    assert set(TRANSITIONS) == set(ReplicaState)


def test_a_connected_replica_loses_its_world_before_it_is_down() -> None:
    for state in ReplicaState:
        if state.has_world:
            assert ReplicaState.LOST in TRANSITIONS[state]
            assert not TRANSITIONS[state] & {ReplicaState.DOWN, ReplicaState.STOPPED, ReplicaState.CONNECTING}


async def test_a_change_that_no_query_shows_wakes_nobody_but_who_waits_for_the_state() -> None:
    changes: list[ReplicaState] = []
    status = ReplicaStatus(lambda: changes.append(status.state))
    waiting = asyncio.create_task(status.until_not(ReplicaState.DOWN))
    await asyncio.sleep(0)
    status.move(ReplicaState.CONNECTING)
    await asyncio.wait_for(waiting, 1)
    assert changes == []
    status.move(ReplicaState.READY, "")
    assert changes == [ReplicaState.READY]


EVENTS = st.lists(
    st.sampled_from(["kill", "restart", "stop", "nothing known", "silence", "speak", "hold", "admit", "wait", "start"]),
    max_size=25,
)


class Walk:
    """Random events on one cluster of fake ranks; a transition that the table lacks fails a task of the session."""

    def __init__(self) -> None:
        self.cluster = MortalCluster(ResumePolicy(timeout_s=0.02, max_tries=3))
        self.starts: list[asyncio.Task[object]] = []

    async def event(self, what: str) -> None:
        cluster, ranks = self.cluster, self.cluster.ranks
        if what == "kill":
            cluster.kill()
        elif what == "restart":
            cluster.restart()
        elif what == "stop":
            ranks[0].break_stream()
            cluster.source.info = ranks.info("stopped")
        elif what == "nothing known":
            cluster.source.info = None
        elif what in ("silence", "speak"):
            ranks[1].silent = what == "silence"
        elif what in ("hold", "admit"):
            ranks[0].refuse("the model is stopped" if what == "hold" else "")
        elif what == "start":
            self.starts.append(asyncio.create_task(cluster.start(2)))
        await asyncio.sleep(0.004 if what == "wait" else 0.0005)

    def check(self) -> None:
        session = self.cluster.session
        (replica,) = session.router.replicas
        assert bool(session.unready_cause) is (replica.status.state is not ReplicaState.READY)
        assert bool(session.down_cause) is not replica.status.state.takes_requests
        assert (replica.world is not None) is replica.status.state.has_world

    async def end(self) -> None:
        """Whatever has happened, a world that starts is found, and closing is final."""
        self.cluster.restart()
        (replica,) = self.cluster.session.router.replicas
        while (world := replica.world) is None or world.info.epoch != self.cluster.ranks.epoch:
            await asyncio.sleep(0.001)
        await self.cluster.session.close()
        assert replica.status.state is ReplicaState.CLOSED
        await asyncio.gather(*self.starts, return_exceptions=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS)
def test_whatever_happens_to_a_cluster_its_state_is_legal_and_it_is_found_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, events: list[str]
) -> None:
    caplog.clear()
    for name, seconds in (
        ("health.QUIET_S", 0.004),
        ("world.WATCH_S", 0.002),
        ("world.HEARTBEAT_MS", 2),
        ("replica.RECONNECT_POLL_S", 0.001),
        ("replica.CAUSE_POLL_S", 0.001),
        ("replica.CAUSE_TIMEOUT_S", 0.005),
        ("router.SILENCE_WAIT_S", 0.005),
    ):
        monkeypatch.setattr(f"allspan.client.cluster.{name}", seconds)

    async def run() -> None:
        walk = Walk()
        async with asyncio.timeout(20):
            await walk.cluster.session.attach(5)
            for event in events:
                await walk.event(event)
                walk.check()
            await walk.end()

    asyncio.run(run())
    assert not [record for record in caplog.records if record.exc_info], "a task of the session failed"


async def test_a_replica_that_nothing_describes_is_stopped_and_found_when_it_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allspan.client.cluster.replica.RECONNECT_POLL_S", 0.002)
    cluster = MortalCluster()
    await cluster.session.attach(5)
    (replica,) = cluster.session.router.replicas
    cluster.ranks[1].break_stream("Socket closed")
    await asyncio.wait_for(replica.status.until_not(ReplicaState.READY), 1)
    assert replica.status.state is ReplicaState.LOST
    assert "rank 1 (pid 101 on testhost) is gone: Socket closed" in replica.status.cause
    cluster.kill()
    await replica.cause_known()
    assert (replica.status.state, replica.status.cause) == (ReplicaState.DOWN, KILLED)
    cluster.source.info = None
    await asyncio.wait_for(replica.status.until_not(ReplicaState.DOWN), 1)
    assert replica.status.state is ReplicaState.STOPPED
    assert not cluster.session.router.may_return
    cluster.restart()
    while replica.status.state is not ReplicaState.READY:
        await asyncio.sleep(0.001)
    await cluster.session.close()
