"""Several replicas behind one session: where requests go, and what becomes of them when a replica dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allspan import ClientEngine
from allspan.client.cluster.state import ReplicaState
from allspan.protos.api.errors import (
    ConfigError,
    DeadlineExceeded,
    QueueFull,
    Unavailable,
)
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.cluster_file import ClusterInfo, replica_dir, write_cluster
from support.fake_worker import FakeCluster
from support.replicas import Replicas
from support.waiting import wait_until

LONG = list(range(100, 228))
"""Four blocks."""


pytestmark = pytest.mark.usefixtures("fast_polls")


async def until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.001)


async def tokens_of(queue: ResultQueue) -> list[int]:
    async with asyncio.timeout(5):
        return [token for output in [output async for output in queue] for token in output.token_ids]


async def test_requests_of_nothing_in_common_are_spread_evenly() -> None:
    made = Replicas(3)
    await made.session.attach(5)
    for i in range(12):
        await made.start([i] * 64)
    assert made.counts == [4, 4, 4]
    await made.session.close()


async def test_what_waits_counts_by_its_tokens(two: Replicas) -> None:
    await two.start([1] * 100)
    for i in range(2, 5):
        await two.start([i] * 20)
    assert two.counts == [1, 3]
    two.step()
    await asyncio.sleep(0.01)  # the long prompt is through
    await two.start([9] * 20)
    assert two.counts == [2, 3]


async def test_a_prompt_goes_where_its_beginning_is_known(two: Replicas) -> None:
    first = await two.place(LONG)
    for i in range(3):
        assert await two.place([*LONG[:96], i, *LONG]) == first
    assert await two.place([5, *LONG]) == 1 - first


async def test_a_second_turn_goes_where_the_first_was_answered(two: Replicas) -> None:
    shared = LONG[:32]
    queue = await two.start(shared, max_tokens=64)
    first = two.counts.index(1)
    two.ranks[first][0].replies["StartRequest"] = QueueFull("for a moment")
    await two.start([*shared, 1])
    assert two.counts[1 - first] == 1  # the beginning is known everywhere by now
    del two.ranks[first][0].replies["StartRequest"]
    for _ in range(64):
        two.step()
    answer = await tokens_of(queue)
    await two.start([3] * 400)
    await two.start([4] * 300)
    assert await two.place([*shared, *answer, 1]) == first


async def test_neither_salts_nor_requests_without_a_cache_share_beginnings(two: Replicas) -> None:
    first = await two.place(LONG)
    assert await two.place(LONG, options=RequestOptions(cache_salt="a")) == 1 - first
    assert await two.place([*LONG, 1], options=RequestOptions(cache_salt="a")) == 1 - first
    counts = two.counts
    loads = [replica.own_load() for replica in two.session.router.replicas]
    least = loads.index(min(loads))
    await two.start(LONG, options=RequestOptions(prefix_cache=False))
    assert two.counts[least] == counts[least] + 1


async def test_an_adapter_shares_no_beginnings_with_the_model_or_another(two: Replicas) -> None:
    first = await two.place(LONG)
    assert await two.place(LONG, options=RequestOptions(adapter="sql")) == 1 - first
    assert await two.place([*LONG, 1], options=RequestOptions(adapter="sql")) == 1 - first


async def test_a_hit_does_not_outweigh_a_far_greater_load(two: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allspan.client.cluster.routing.choice.SLACK_TOKENS", 0)
    places = [await two.place([*LONG, i], max_tokens=256) for i in range(12)]
    first = places[0]
    # The first has 899 tokens to compute by then; 1.25 × the mean, a request and a hit are 819.
    assert places[:4] == [first, first, first, 1 - first]
    assert {0, 1} == set(places[5:])


async def test_a_full_replica_is_passed_over(two: Replicas) -> None:
    two.ranks[0][0].replies["StartRequest"] = QueueFull("1024 wait")
    for i in range(3):
        await two.start([i] * 40)
    assert two.counts[1] == 3
    two.ranks[1][0].replies["StartRequest"] = QueueFull("1024 wait")
    with pytest.raises(QueueFull, match="1024 wait"):
        await two.start()
    assert len(two.session.queues()) == 3


async def test_a_replica_that_is_down_is_skipped_and_used_again_when_it_is_back(two: Replicas) -> None:
    two.kill(0)
    await until(lambda: len(two.session.router.ready) == 1)
    assert two.session.down_cause == ""
    for i in range(4):
        assert await two.place([i] * 40) == 1
    two.restart(0)
    await until(lambda: len(two.session.router.ready) == 2)
    assert await two.place([9] * 40) == 0


async def test_when_all_are_down_each_ones_cause_is_told(two: Replicas) -> None:
    for replica in range(2):
        two.kill(replica)
    await until(lambda: two.session.down_cause.count("was killed") == 2)
    with pytest.raises(
        Unavailable, match=r"replica 0: rank 1 .* of replica 0 was killed; replica 1: rank 1 .* of replica 1 was killed"
    ):
        await two.start()


async def test_a_cause_that_names_its_replica_names_it_once(two: Replicas) -> None:
    first, second = two.session.router.replicas
    first.status.move(ReplicaState.LOST, "rank 0 was killed")
    second.status.move(ReplicaState.LOST, "replica 1 is down: six failures")
    assert two.session.down_cause == "replica 0: rank 0 was killed; replica 1 is down: six failures"


async def test_a_failed_operation_names_its_replica_once(two: Replicas) -> None:
    for replica, cause in enumerate(("busy", "replica 1 is down: six failures")):
        two.ranks[replica][0].replies["Control"] = Unavailable(cause)
    router = two.session.router
    _, failures = await router._ask_all(lambda replica, world: world.control("reset_prefix_cache", 1.0))
    assert [str(failure) for failure in failures] == ["replica 0: busy", "replica 1 is down: six failures"]


@pytest.mark.parametrize("will_restart", [False, True])
async def test_streams_go_on_in_the_other_replica_at_once(two: Replicas, will_restart: bool) -> None:
    queues = [await two.start([10 * i, 10 * i + 1]) for i in range(6)]
    assert two.counts == [3, 3]
    two.step()
    await until(lambda: all(queue.num_tokens == 1 for queue in queues))
    started = time.monotonic()
    two.kill(1, will_restart)
    await until(lambda: two.counts[0] == 6)
    assert time.monotonic() - started < 1.0
    for _ in range(3):
        two.step()
    for i, queue in enumerate(queues):
        assert await tokens_of(queue) == [10 * i + n for n in (2, 3, 4, 5)]


async def test_a_request_on_its_way_into_a_replica_that_dies_goes_to_the_other(two: Replicas) -> None:
    two.ranks[0][0].replies["StartRequest"] = 60.0
    start = asyncio.create_task(two.start())
    await until(lambda: ("StartRequest", 0) in two.ranks[0].calls)
    two.kill(0, will_restart=False)
    queue = await asyncio.wait_for(start, 3)
    assert two.counts[1] == 1
    for _ in range(4):
        two.step()
    assert await tokens_of(queue) == [4, 5, 6, 7]


def drain(two: Replicas, replica: int) -> None:
    """As a rolling restart begins: the supervisor says so, and the ranks let nothing in."""
    two.sources[replica].info = two.ranks[replica].info("down", "is being restarted", will_restart=True)
    two.ranks[replica][0].replies["StartRequest"] = Unavailable("the server is shutting down")


async def test_a_request_that_draining_replicas_refuse_goes_to_the_one_that_comes_back(two: Replicas) -> None:
    two.kill(0)
    await until(lambda: len(two.session.router.ready) == 1)
    drain(two, 1)  # before this client has found the new ranks of replica 0
    starting = [asyncio.create_task(two.start([i] * 8)) for i in range(4)]
    await until(lambda: two.counts[1] >= 4)
    assert not any(start.done() for start in starting)
    two.restart(0)
    queues = await asyncio.gather(*starting)
    assert two.counts[0] == 4
    for _ in range(4):
        two.step()
    assert [await tokens_of(queue) for queue in queues] == [[i + n for n in (1, 2, 3, 4)] for i in range(4)]


async def test_waiting_for_a_replica_ends_with_the_requests_time_or_its_caller(two: Replicas) -> None:
    for replica in range(2):
        drain(two, replica)
    started = time.monotonic()
    with pytest.raises((DeadlineExceeded, Unavailable)):
        await two.start(options=RequestOptions(timeout_s=0.1))
    assert time.monotonic() - started < 3.0
    start = asyncio.create_task(two.start())
    await until(lambda: len(two.session.queues()) == 1)
    start.cancel()
    await until(lambda: not two.session.queues())
    for source in two.sources:
        source.info = two.ranks[two.sources.index(source)].info("stopped")
    with pytest.raises(Unavailable, match="shutting down"):
        await two.start()  # nothing will come back


async def test_a_replica_that_says_that_it_drains_is_asked_last(two: Replicas) -> None:
    first = await two.place(LONG)
    two.step()
    two.ranks[first][0].refuse("the server is shutting down")
    held = two.session.router.replicas[first].status
    await until(lambda: held.state is ReplicaState.HELD)
    before = two.counts[first]
    assert await two.place(LONG) == 1 - first
    assert two.counts[first] == before


async def test_both_dying_in_turn_loses_nothing(two: Replicas) -> None:
    queue = await two.start(max_tokens=5)
    for turn in range(4):
        two.step()
        await until(lambda turn=turn: queue.num_tokens == turn + 1)  # type: ignore[misc]
        place = 0 if turn % 2 == 0 else 1
        two.kill(place)
        await until(lambda place=place: two.counts[1 - place])  # type: ignore[misc]
        two.restart(place)
        await until(lambda: len(two.session.router.ready) == 2)
    two.step()
    assert await tokens_of(queue) == [4, 5, 6, 7, 8]


async def test_one_replica_is_enough_to_attach_and_the_other_joins_later() -> None:
    made = Replicas()
    made.sources[0].info = made.ranks[0].info("down", "no memory", will_restart=True)
    await made.session.attach(5)
    assert await made.place([1]) == 1
    made.sources[0].info = made.ranks[0].info()
    await until(lambda: len(made.session.router.ready) == 2)
    await made.session.close()


async def test_no_replica_is_not_enough() -> None:
    made = Replicas()
    for i, source in enumerate(made.sources):
        source.info = made.ranks[i].info("stopped", "no memory")
    with pytest.raises(Unavailable, match="is stopped: no memory"):
        await made.session.attach(5)
    await made.session.close()


async def test_replicas_of_different_models_are_refused() -> None:
    made = Replicas()
    made.sources[1].info = made.ranks[1].info(vocab_size=999)
    with pytest.raises(ConfigError, match="replica 1 has vocab_size 999, replica 0 1000"):
        await made.session.attach(5)
    await made.session.close()


async def test_operations_reach_every_replica_and_forget_what_it_had(two: Replicas) -> None:
    first = await two.place(LONG)
    await two.session.control("reset_prefix_cache", 0.0)
    assert [ranks.calls.count(("Control", 0)) for ranks in two.ranks] == [1, 1]
    assert all(len(replica.knowledge) == 0 for replica in two.session.router.replicas)
    two.ranks[1 - first][0].replies["Control"] = Unavailable("busy")
    with pytest.raises(Unavailable, match=f"replica {1 - first}: busy"):
        await two.session.control("stop_model", 1.0)


async def test_statistics_are_added_up_with_an_entry_for_each_rank(two: Replicas) -> None:
    found = await two.session.statistics()
    assert [(rank.replica, rank.rank) for rank in found.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (found.replicas, found.replicas_ready) == (2, 2)
    two.kill(0)
    await until(lambda: len(two.session.router.ready) == 1)
    found = await two.session.statistics()
    assert [(rank.replica, rank.rank) for rank in found.ranks] == [(1, 0), (1, 1)]
    assert (found.replicas, found.replicas_ready) == (2, 1)


def test_a_run_directory_of_replicas_and_lists_of_addresses_are_attached_to(tmp_path: Path) -> None:
    names = []
    for i in range(2):
        replica_dir(tmp_path, i).mkdir()
        names.append(replica_dir(tmp_path, i).name)
    with FakeCluster(replica_dir(tmp_path, 0)) as first, FakeCluster(replica_dir(tmp_path, 1)) as second:
        write_cluster(tmp_path, ClusterInfo(1, "ready", "fake", "", replicas=tuple(names)))
        for attach in (tmp_path, str(tmp_path / "cluster.json"), [first.addresses, second.addresses]):
            with ClientEngine(attach=attach) as engine:
                engine.generate([[i] * 40 for i in range(8)], SamplingParams(max_tokens=2))
                found = engine.statistics()
                assert (found.replicas_ready, found.max_model_len, len(engine.cluster.ranks)) == (2, 256, 2)
        started = [sum(event[:2] == ("start", 0) for event in cluster.events) for cluster in (first, second)]
        assert started == [12, 12]
        with ClientEngine(attach=tmp_path) as engine:
            first.paused = second.paused = True
            queues = [engine.start_request([i] * 40, SamplingParams(max_tokens=9))[1] for i in range(4)]
            second.kill(1, "it was killed")
            first.paused = False
            assert [[t for out in queue for t in out.token_ids] for queue in queues] == [
                [i + 1 + n for n in range(9)] for i in range(4)
            ]
            assert engine.is_ready
            first.kill(0, "it was killed, too")
            wait_until(lambda: engine.down_cause.count("it was killed") == 2)
    with pytest.raises(ConfigError, match="mixes"):
        ClientEngine(attach=[first.addresses, "unix:/nowhere"])  # type: ignore[list-item]
