"""The facade's session against scripted ranks: order of the fan-out, refusals, loss of a world, the next epoch."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable

import pytest

from allspan.client.cluster.requests import Session
from allspan.protos.api.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    Unavailable,
)
from allspan.protos.api.results import Output, RequestState, ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.convert import sampling_from_wire
from support.fake_transport import FakeRanks, FakeSource

PARAMS = SamplingParams(max_tokens=4, seed=1)


class Cluster:
    def __init__(self, size: int) -> None:
        self.ranks = FakeRanks(size)
        self.source = FakeSource(self.ranks.info())
        self.session = Session([self.source], self.ranks.connect, call_timeout=0.5)

    async def start(self) -> tuple[bytes, ResultQueue]:
        request_id = uuid.uuid4().bytes
        return request_id, await self.session.start(request_id, [1, 2, 3], PARAMS)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(3)
    await made.session.attach(5)
    yield made
    await made.session.close()


async def until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.001)


async def test_followers_get_a_request_before_the_leader(cluster: Cluster) -> None:
    await cluster.start()
    assert sorted(cluster.ranks.calls[:2]) == [("StartRequest", 1), ("StartRequest", 2)]
    assert cluster.ranks.calls[2:] == [("StartRequest", 0)]


async def test_the_leader_waits_for_the_slowest_follower(cluster: Cluster) -> None:
    cluster.ranks[1].replies["StartRequest"] = 0.05
    started = time.monotonic()
    await cluster.start()
    assert cluster.ranks.calls[-1] == ("StartRequest", 0)
    assert time.monotonic() - started >= 0.05


async def test_every_rank_gets_the_same_payload_with_lease_epoch_and_seed(cluster: Cluster) -> None:
    request_id, _ = await cluster.start()
    messages = [cluster.ranks[r].requests["StartRequest"][0] for r in range(3)]
    assert messages[0] == messages[1] == messages[2]
    assert (messages[0].request_id, messages[0].epoch, sampling_from_wire(messages[0].sampling).seed) == (
        request_id,
        1,
        1,
    )
    assert messages[0].client_id == cluster.ranks[0].requests["Results"][0].client_id != ""


async def test_a_follower_that_refuses_withdraws_it_from_the_others_and_spares_the_leader(cluster: Cluster) -> None:
    cluster.ranks[1].replies["StartRequest"] = QueueFull("1024 requests wait")
    with pytest.raises(QueueFull, match="1024 requests wait"):
        await cluster.start()
    assert ("StartRequest", 0) not in cluster.ranks.calls
    assert [call for call in cluster.ranks.calls if call[0] == "StopRequest"] == [("StopRequest", 2)]


async def test_a_leader_that_refuses_withdraws_it_from_all_followers(cluster: Cluster) -> None:
    cluster.ranks[0].replies["StartRequest"] = InvalidRequest("max_tokens is 9, at most 5")
    with pytest.raises(InvalidRequest, match="max_tokens is 9"):
        await cluster.start()
    stops = [rank for method, rank in cluster.ranks.calls if method == "StopRequest"]
    assert sorted(stops) == [1, 2]
    assert cluster.session.queues() == []


async def test_a_leader_that_does_not_answer_is_asked_to_stop_before_its_followers(
    cluster: Cluster,
) -> None:
    cluster.ranks[0].replies["StartRequest"] = 60.0
    with pytest.raises(DeadlineExceeded):
        await cluster.start()
    assert [rank for method, rank in cluster.ranks.calls if method == "StopRequest"] == [0]
    request_id = cluster.ranks[0].requests["StopRequest"][0].request_ids[0]
    cluster.ranks[0].send((request_id, Output(finish_reason="cancelled")))
    await until(lambda: ("StopRequest", 1) in cluster.ranks.calls and ("StopRequest", 2) in cluster.ranks.calls)
    assert cluster.session.queues() == []


async def test_tokens_go_to_their_own_requests(cluster: Cluster) -> None:
    (first, first_queue), (second, second_queue) = await cluster.start(), await cluster.start()
    cluster.ranks[0].send((first, Output((1,))), (second, Output((7,))))
    cluster.ranks[0].send((second, Output((8,), finish_reason="length")), (first, Output((2,))))
    cluster.ranks[0].send((first, Output((3,), finish_reason="stop", stop_token_id=3)))
    assert [t for output in [o async for o in first_queue] for t in output.token_ids] == [1, 2, 3]
    assert [t for output in [o async for o in second_queue] for t in output.token_ids] == [7, 8]
    assert not [call for call in cluster.ranks.calls if call[0] == "StopRequest"]


async def test_a_request_that_fails_alone_leaves_the_followers_too(cluster: Cluster) -> None:
    request_id, queue = await cluster.start()
    _, other = await cluster.start()
    cluster.ranks[0].send((request_id, Output(finish_reason="error")))
    await until(lambda: {("StopRequest", 1), ("StopRequest", 2)} <= set(cluster.ranks.calls))
    assert queue.state.is_final
    assert not other.state.is_final


async def test_an_id_in_use_is_refused_before_anything_is_sent(cluster: Cluster) -> None:
    request_id, _ = await cluster.start()
    calls = len(cluster.ranks.calls)
    with pytest.raises(AlreadyExists, match=request_id.hex()):
        await cluster.session.start(request_id, [1], PARAMS)
    assert len(cluster.ranks.calls) == calls


async def test_stop_asks_the_leader_first_and_the_followers_after_its_final_output(cluster: Cluster) -> None:
    request_id, queue = await cluster.start()
    await cluster.session.stop(request_id)
    assert [rank for method, rank in cluster.ranks.calls if method == "StopRequest"] == [0]
    cluster.ranks[0].send((request_id, Output(finish_reason="cancelled")))
    output = await queue.aget(5)
    assert output is not None
    assert output.finish_reason == "cancelled"
    await until(lambda: {("StopRequest", 1), ("StopRequest", 2)} <= set(cluster.ranks.calls))


async def test_stop_and_release_of_ended_and_unknown_requests_do_nothing(cluster: Cluster) -> None:
    request_id, _ = await cluster.start()
    cluster.ranks[0].send((request_id, Output((1,), finish_reason="length")))
    await until(lambda: not cluster.session.queues())
    for _ in range(2):
        await cluster.session.stop(request_id)
        cluster.session.release(request_id)
        cluster.session.release(uuid.uuid4().bytes)
    await asyncio.sleep(0)
    assert not [call for call in cluster.ranks.calls if call[0] == "StopRequest"]


async def test_a_released_request_ends_at_once_for_its_reader(cluster: Cluster) -> None:
    request_id, queue = await cluster.start()
    cluster.session.release(request_id)
    output = queue.get_nowait()
    assert output is not None
    assert output.finish_reason == "cancelled"
    await until(lambda: ("StopRequest", 0) in cluster.ranks.calls)


async def test_cancelling_a_start_leaves_no_request_behind(cluster: Cluster) -> None:
    cluster.ranks[0].replies["StartRequest"] = 0.1
    start = asyncio.create_task(cluster.start())
    await until(lambda: ("StartRequest", 0) in cluster.ranks.calls)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await until(lambda: ("StopRequest", 0) in cluster.ranks.calls)


@pytest.mark.parametrize("rank", [0, 2])
async def test_a_broken_stream_fails_every_open_request_naming_rank_pid_host_and_cause(
    cluster: Cluster, rank: int
) -> None:
    queues = [(await cluster.start())[1] for _ in range(3)]
    started = time.monotonic()
    cluster.ranks[rank].break_stream("Socket closed")
    cluster.source.info = None
    for queue in queues:
        with pytest.raises(Unavailable, match=rf"rank {rank} \(pid {100 + rank} on testhost\) is gone: Socket closed"):
            await queue.aget(5)
    assert time.monotonic() - started < 3.0
    assert f"rank {rank}" in cluster.session.down_cause


async def test_the_supervisors_cause_is_preferred(cluster: Cluster) -> None:
    _, queue = await cluster.start()
    cluster.ranks[1].break_stream()
    await asyncio.sleep(0.05)
    cluster.source.info = cluster.ranks.info("down", "rank 1 (pid 101 on testhost) was killed by SIGKILL")
    with pytest.raises(Unavailable, match=r"^rank 1 \(pid 101 on testhost\) was killed by SIGKILL$"):
        await queue.aget(5)


async def test_a_cause_that_names_no_rank_is_completed_with_what_was_seen(cluster: Cluster) -> None:
    _, queue = await cluster.start()
    cluster.source.info = cluster.ranks.info("down", "mpirun ended with code 137")
    cluster.ranks[1].break_stream("Socket closed")
    with pytest.raises(Unavailable, match=r"mpirun ended with code 137 \(rank 1 .* is gone: Socket closed\)"):
        await queue.aget(5)


async def test_a_stopped_cluster_says_so(cluster: Cluster) -> None:
    _, queue = await cluster.start()
    cluster.source.info = cluster.ranks.info("stopped")
    cluster.ranks[0].end_stream()
    with pytest.raises(Unavailable, match="the cluster of tiny was stopped"):
        await queue.aget(5)


async def test_a_request_that_is_stopped_and_then_released_is_stopped_once(cluster: Cluster) -> None:
    request_id, queue = await cluster.start()
    await cluster.session.stop(request_id)
    cluster.session.release(request_id)
    assert queue.state is RequestState.CANCELLED
    await asyncio.sleep(0.02)
    assert cluster.ranks.calls.count(("StopRequest", 0)) == 1
    other, _ = await cluster.start()
    cluster.session.release(other)
    await until(lambda: cluster.ranks.calls.count(("StopRequest", 0)) == 2)


async def test_requests_are_refused_at_once_while_down(cluster: Cluster) -> None:
    cluster.ranks[1].break_stream()
    cluster.source.info = cluster.ranks.info("down", "rank 1 was killed by SIGKILL")
    await until(lambda: cluster.session.down_cause == "rank 1 was killed by SIGKILL")
    started = time.monotonic()
    with pytest.raises(Unavailable, match="rank 1 was killed by SIGKILL"):
        await cluster.start()
    assert time.monotonic() - started < 2.0


async def test_a_rank_found_dead_by_a_request_is_named(cluster: Cluster) -> None:
    cluster.ranks[2].replies = dict.fromkeys(("StartRequest", "Status"), Unavailable("Connection refused"))
    cluster.source.info = cluster.ranks.info("down", "rank 2 (pid 102 on testhost) was killed by SIGKILL")
    with pytest.raises(Unavailable, match=r"rank 2 \(pid 102 on testhost\) was killed by SIGKILL"):
        await cluster.start()


async def test_a_live_rank_that_is_not_ready_for_requests_does_not_end_the_world(cluster: Cluster) -> None:
    cluster.ranks[0].replies["StartRequest"] = Unavailable("the model is stopped")
    with pytest.raises(Unavailable, match="the model is stopped"):
        await cluster.start()
    assert cluster.session.down_cause == ""
    del cluster.ranks[0].replies["StartRequest"]
    await cluster.start()


async def test_the_next_epoch_is_found_without_being_asked(cluster: Cluster) -> None:
    cluster.ranks[1].break_stream()
    cluster.source.info = cluster.ranks.info("down", "rank 1 was killed")
    await until(lambda: cluster.session.down_cause == "rank 1 was killed")
    cluster.ranks.revive()
    cluster.source.info = cluster.ranks.info()
    await until(lambda: cluster.session.down_cause == "")
    request_id, queue = await cluster.start()
    assert cluster.ranks[0].requests["StartRequest"][0].epoch == 2
    cluster.ranks[0].send((request_id, Output((5,), finish_reason="length")))
    output = await queue.aget(5)
    assert output is not None
    assert output.token_ids == (5,)


async def test_a_request_finds_the_next_epoch_before_the_poll_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allspan.client.cluster.replica.RECONNECT_POLL_S", 60.0)
    cluster.ranks[1].break_stream()
    cluster.source.info = cluster.ranks.info("down", "rank 1 was killed")
    await until(lambda: cluster.session.down_cause == "rank 1 was killed")
    cluster.ranks.revive()
    cluster.source.info = cluster.ranks.info()
    await cluster.start()
    assert cluster.session.down_cause == ""


async def test_closing_ends_requests_and_leases(cluster: Cluster) -> None:
    _, queue = await cluster.start()
    assert all(cluster.ranks[r].is_subscribed for r in range(3))
    await cluster.session.close()
    with pytest.raises(RequestCancelled, match="closed"):
        queue.get_nowait()
    assert not any(cluster.ranks[r].is_subscribed for r in range(3))
    with pytest.raises(Unavailable, match="closed"):
        await cluster.start()


async def test_attaching_waits_for_a_cluster_that_starts() -> None:
    made = Cluster(2)
    made.source.info = made.ranks.info("starting")
    attach = asyncio.create_task(made.session.attach(5))
    await asyncio.sleep(0.05)
    assert not attach.done()
    made.source.info = made.ranks.info()
    await attach
    await made.session.close()


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ("starting", DeadlineExceeded, "not ready within 0.1 s"),
        ("down", Unavailable, "is down: no shared memory"),
        ("stopped", Unavailable, "is stopped: no shared memory"),
    ],
)
async def test_attaching_to_a_cluster_that_will_not_serve_says_why(
    state: str, error: type[Exception], words: str
) -> None:
    made = Cluster(2)
    made.source.info = made.ranks.info(state, "no shared memory")
    with pytest.raises(error, match=words):
        await made.session.attach(0.1)


async def test_attaching_to_a_world_that_has_just_died_waits_for_the_next() -> None:
    made = Cluster(2)
    made.ranks[1].break_stream()
    attach = asyncio.create_task(made.session.attach(5))
    await asyncio.sleep(0.05)
    made.source.info = made.ranks.info("down", "killed", will_restart=True)
    await asyncio.sleep(0.05)
    assert not attach.done()
    made.ranks.revive()
    made.source.info = made.ranks.info()
    await attach
    await made.start()
    await made.session.close()


async def test_attaching_to_ranks_of_another_epoch_is_refused() -> None:
    made = Cluster(2)
    made.ranks.epoch = 4
    with pytest.raises(Unavailable, match=r"answers as \(rank, of, epoch\) \(0, 2, 4\), expected \(0, 2, 1\)"):
        await made.session.attach(5)
    assert not made.ranks[0].is_subscribed


async def test_a_failure_of_ours_while_reading_results_is_no_silence(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(queue: ResultQueue, message: object) -> None:
        raise InternalError("a bug")

    request_id, queue = await cluster.start()
    monkeypatch.setattr("allspan.client.cluster.request.OpenRequest.deliver", broken)
    cluster.source.info = None
    cluster.ranks[0].send((request_id, Output((1,))))
    with pytest.raises(Unavailable, match="a bug"):
        await queue.aget(5)
