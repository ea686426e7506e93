"""Requests whose world dies: they go on in the next, without a token more or less, or fail in time with the cause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from allspan.client.cluster.requests import ResumePolicy
from allspan.client.cluster.router import Router
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import (
    AllspanError,
    DeadlineExceeded,
    QueueFull,
    Unavailable,
)
from allspan.protos.api.results import Output, RequestState
from allspan.protos.convert import sampling_from_wire
from support.mortal_cluster import KILLED, MortalCluster, tokens_of, until

pytestmark = pytest.mark.usefixtures("fast_polls")


@pytest.fixture
async def cluster() -> AsyncIterator[MortalCluster]:
    made = MortalCluster()
    await made.session.attach(5)
    yield made
    await made.session.close()


async def test_a_request_before_its_first_token_is_sent_again_whole(cluster: MortalCluster) -> None:
    _, queue = await cluster.start()
    first = cluster.sent[0]
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    assert cluster.sent[0].epoch == 2
    again = pb.StartRequestMessage()
    again.CopyFrom(cluster.sent[0])
    again.client_id, again.epoch = first.client_id, first.epoch
    assert again == first
    for _ in range(4):
        cluster.ranks.step()
    assert await tokens_of(queue) == [4, 5, 6, 7]


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_stream_goes_on_after_the_tokens_that_its_caller_has(cluster: MortalCluster, rank: int) -> None:
    request_id, queue = await cluster.start()
    for _ in range(2):
        cluster.ranks.step()
    await until(lambda: queue.num_tokens == 2)
    cluster.kill(rank)
    await until(lambda: cluster.session.down_cause)
    cluster.restart()
    await until(lambda: cluster.sent)
    message = cluster.sent[0]
    assert (list(message.prompt_token_ids), list(message.output_token_ids)) == ([1, 2, 3], [4, 5])
    params = sampling_from_wire(message.sampling)
    assert (message.request_id, params.seed, params.max_tokens) == (request_id, 7, 4)
    for _ in range(2):
        cluster.ranks.step()
    assert await tokens_of(queue) == [4, 5, 6, 7]
    assert queue.state is RequestState.FINISHED


async def test_a_request_that_comes_back_to_the_world_it_left_has_another_id_there(cluster: MortalCluster) -> None:
    """Only the connection was lost: the ranks have just cancelled it, and keep its id for a while yet."""
    request_id, queue = await cluster.start()
    cluster.ranks.step()
    await until(lambda: queue.num_tokens == 1)
    for rank in cluster.ranks:
        rank.reset()
    await until(lambda: cluster.sent)
    message = cluster.sent[0]
    assert (message.epoch, list(message.output_token_ids)) == (1, [4])
    assert message.request_id != request_id
    cluster.ranks.step()
    await until(lambda: queue.num_tokens == 2)
    await cluster.session.stop(request_id)
    await until(lambda: cluster.ranks[0].requests.get("StopRequest"))
    assert cluster.ranks[0].requests["StopRequest"][-1].request_ids == [message.request_id]


async def test_a_request_that_comes_as_the_world_is_lost_is_told_the_cause(
    cluster: MortalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found the world ready, and was not yet on its way."""
    some_ready = Router.some_ready

    async def just_before(router: Router) -> None:
        await some_ready(router)
        cluster.ranks[1].break_stream()
        await until(lambda: router.down_cause)
        asyncio.get_running_loop().call_later(0.05, cluster.kill, 1, False)
        monkeypatch.undo()

    monkeypatch.setattr(Router, "some_ready", just_before)
    with pytest.raises(Unavailable) as caught:
        await cluster.start()
    assert KILLED in caught.value.message


async def test_a_world_that_is_replaced_while_it_is_attached_to_is_not_used(cluster: MortalCluster) -> None:
    cluster.kill()
    await until(lambda: cluster.session.down_cause)
    cluster.ranks.revive()
    second = cluster.ranks.info()
    asked = []

    async def meanwhile(request: object) -> None:
        cluster.source.info = replace(second, epoch=3)
        asked.append(request)

    cluster.ranks[1].replies["Status"] = meanwhile
    cluster.source.info = second
    await until(lambda: len(asked) == 3)
    assert cluster.session.down_cause
    cluster.ranks.revive()
    await until(lambda: not cluster.session.down_cause)
    assert cluster.session.info is not None
    assert cluster.session.info.epoch == 3


async def test_what_a_lost_world_still_says_is_not_heard(cluster: MortalCluster) -> None:
    _, queue = await cluster.start()
    cluster.ranks.step()
    await until(lambda: queue.num_tokens == 1)
    cluster.kill(1)
    await until(lambda: cluster.session.down_cause)
    cluster.ranks.step()  # the leader lives still, and its stream is whole
    await asyncio.sleep(0)
    assert queue.num_tokens == 1


@pytest.mark.parametrize("will_restart", [False, True])
async def test_without_a_world_to_come_requests_fail_at_once_and_with_one_they_wait(
    cluster: MortalCluster, will_restart: bool
) -> None:
    _, queue = await cluster.start()
    started = time.monotonic()
    cluster.kill(will_restart=will_restart)
    if will_restart:
        await until(lambda: cluster.session.down_cause == KILLED)
        assert queue.state is RequestState.WAITING
        cluster.source.info = cluster.ranks.info("stopped", "3 failures within 60 s")
    with pytest.raises(Unavailable, match=r"SIGKILL|3 failures within 60 s"):
        await queue.aget(5)
    assert time.monotonic() - started < 3.0


async def test_a_run_directory_that_vanishes_ends_the_wait(cluster: MortalCluster) -> None:
    _, queue = await cluster.start()
    cluster.kill()
    await until(lambda: cluster.session.down_cause == KILLED)
    cluster.source.info = None
    with pytest.raises(Unavailable, match="SIGKILL"):
        await queue.aget(3)


async def test_the_wait_for_a_world_has_an_end() -> None:
    made = MortalCluster(ResumePolicy(timeout_s=0.1))
    await made.session.attach(5)
    _, queue = await made.start()
    made.kill()
    with pytest.raises(Unavailable, match=r"SIGKILL \(nothing to go on in within 0\.1 s\)"):
        await queue.aget(5)
    assert made.session.queues() == []
    await made.session.close()


async def test_switched_off_it_fails_every_request_with_the_cause() -> None:
    made = MortalCluster(ResumePolicy(enabled=False))
    await made.session.attach(5)
    _, queue = await made.start()
    made.kill()
    with pytest.raises(Unavailable, match=r"^rank 1 .* was killed by SIGKILL$"):
        await queue.aget(5)
    made.restart()
    await until(lambda: not made.session.down_cause)
    assert not made.sent
    await made.session.close()


async def test_a_request_that_loses_world_after_world_is_given_up() -> None:
    made = MortalCluster(ResumePolicy(max_tries=2))
    await made.session.attach(5)
    _, queue = await made.start()
    for _ in range(2):
        await made.die_and_return()
        await until(lambda: made.sent)
    made.kill()
    with pytest.raises(Unavailable, match=r"SIGKILL \(3 worlds in a row were lost without a token"):
        await queue.aget(5)
    await made.session.close()


async def test_a_token_begins_the_count_of_lost_worlds_anew() -> None:
    made = MortalCluster(ResumePolicy(max_tries=1))
    await made.session.attach(5)
    _, queue = await made.start(max_tokens=6)
    for i in range(5):
        made.ranks.step()
        await until(lambda i=i: queue.num_tokens == i + 1)  # type: ignore[misc]
        await made.die_and_return()
        await until(lambda: made.sent)
    made.ranks.step()
    assert await tokens_of(queue) == [4, 5, 6, 7, 8, 9]
    await made.session.close()


async def test_a_full_queue_does_not_turn_a_resumed_request_away(cluster: MortalCluster) -> None:
    _, queue = await cluster.start(max_tokens=1)
    cluster.kill()
    await until(lambda: cluster.session.down_cause)
    cluster.ranks.revive()
    cluster.ranks[0].replies["StartRequest"] = QueueFull("1024 requests wait")
    cluster.source.info = cluster.ranks.info()
    await until(lambda: cluster.sent)
    assert not queue.state.is_final
    del cluster.ranks[0].replies["StartRequest"]
    cluster.ranks[0].requests.clear()
    await until(lambda: cluster.sent)
    cluster.ranks.step()
    assert await tokens_of(queue) == [4]


async def test_a_leader_that_gives_its_requests_up_before_it_dies_fails_none(cluster: MortalCluster) -> None:
    request_id, queue = await cluster.start(max_tokens=2)
    cluster.ranks.step()
    await until(lambda: queue.num_tokens == 1)
    cluster.ranks[0].replies["StartRequest"] = Unavailable("the engine of rank 0 has failed: a peer is gone")
    cluster.ranks[0].fail(request_id, Unavailable("the engine of rank 0 has failed: a peer is gone"))
    await until(lambda: len(cluster.sent) > 1)  # refused, for the time being
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    cluster.ranks.step()
    assert await tokens_of(queue) == [4, 5]


async def test_an_error_of_the_request_itself_is_not_tried_again(cluster: MortalCluster) -> None:
    request_id, queue = await cluster.start()
    cluster.ranks[0].fail(request_id, DeadlineExceeded("timeout_s is over"))
    with pytest.raises(DeadlineExceeded):
        await queue.aget(5)
    assert len(cluster.sent) == 1


@pytest.mark.parametrize("slow", [0, 1])
async def test_a_request_on_its_way_in_is_neither_lost_nor_doubled(cluster: MortalCluster, slow: int) -> None:
    cluster.ranks[slow].replies["StartRequest"] = 60.0
    start = asyncio.create_task(cluster.start(max_tokens=2))
    await until(lambda: ("StartRequest", slow) in cluster.ranks.calls)
    if slow == 0:
        cluster.ranks.step()  # the leader has it, and says so in its stream before it answers the call
        await until(lambda: cluster.session.queues()[0].num_tokens == 1)
    cluster.kill(1 - slow)
    await until(lambda: cluster.session.down_cause)
    assert not start.done()
    cluster.restart()
    _, queue = await asyncio.wait_for(start, 5)
    assert len(cluster.sent) == 1
    for _ in range(2):
        cluster.ranks.step()
    assert await tokens_of(queue) == [4, 5]


async def test_a_request_on_its_way_in_fails_with_the_cause_when_there_is_no_restart(cluster: MortalCluster) -> None:
    cluster.ranks[0].replies["StartRequest"] = 60.0
    start = asyncio.create_task(cluster.start())
    await until(lambda: ("StartRequest", 0) in cluster.ranks.calls)
    cluster.kill(1, will_restart=False)
    with pytest.raises(Unavailable, match=r"^rank 1 .* was killed by SIGKILL$"):
        await asyncio.wait_for(start, 3)
    assert cluster.session.queues() == []


async def test_a_world_that_dies_while_requests_are_sent_to_it_again_is_one_more_loss(cluster: MortalCluster) -> None:
    _, queue = await cluster.start(max_tokens=3)
    cluster.ranks.step()
    await until(lambda: queue.num_tokens == 1)
    cluster.kill()
    await until(lambda: cluster.session.down_cause)
    cluster.ranks.revive()
    cluster.ranks[0].replies["StartRequest"] = 60.0
    cluster.source.info = cluster.ranks.info()
    await until(lambda: cluster.sent)
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    assert list(cluster.sent[0].output_token_ids) == [4]
    for _ in range(2):
        cluster.ranks.step()
    assert await tokens_of(queue) == [4, 5, 6]


@pytest.mark.parametrize("way", ["stop", "release"])
async def test_a_request_that_is_stopped_between_two_worlds_ends_there(cluster: MortalCluster, way: str) -> None:
    request_id, queue = await cluster.start()
    cluster.ranks.step()
    await until(lambda: queue.num_tokens == 1)
    cluster.kill()
    await until(lambda: cluster.session.down_cause)
    if way == "stop":
        await cluster.session.stop(request_id)
    else:
        cluster.session.release(request_id)
    output = await queue.aget(1)
    assert output is not None
    assert (output.token_ids, output.finish_reason) == ((4,), "cancelled")
    cluster.restart()
    await until(lambda: not cluster.session.down_cause)
    assert cluster.session.queues() == []
    assert not cluster.sent


async def test_a_request_that_was_stopped_is_not_resumed(cluster: MortalCluster) -> None:
    request_id, queue = await cluster.start()
    await cluster.session.stop(request_id)
    cluster.kill()
    output = await queue.aget(5)
    assert output is not None
    assert output.finish_reason == "cancelled"


async def test_a_request_stopped_while_it_is_sent_again_is_stopped_there(cluster: MortalCluster) -> None:
    request_id, queue = await cluster.start()
    cluster.kill()
    await until(lambda: cluster.session.down_cause)
    cluster.ranks.revive()
    cluster.ranks[0].replies["StartRequest"] = 0.05
    cluster.source.info = cluster.ranks.info()
    await until(lambda: cluster.sent)
    await cluster.session.stop(request_id)
    await until(lambda: cluster.ranks[0].requests.get("StopRequest"))
    cluster.ranks[0].send((request_id, Output(finish_reason="cancelled")))
    await until(lambda: queue.state is RequestState.CANCELLED)


async def test_closing_ends_requests_that_wait_for_a_world(cluster: MortalCluster) -> None:
    _, queue = await cluster.start()
    cluster.kill()
    await until(lambda: cluster.session.down_cause == KILLED)
    await cluster.session.close()
    with pytest.raises(AllspanError, match="closed"):
        queue.get_nowait()


async def test_a_leader_that_never_answers_about_a_request_does_not_keep_it_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allspan.client.cluster.requests.FINAL_OUTPUT_S", 0.01)
    cluster = MortalCluster(call_timeout=0.05)
    await cluster.session.attach(5)
    cluster.ranks[0].replies["StartRequest"] = 60.0
    with pytest.raises(DeadlineExceeded):
        await cluster.start()
    assert len(cluster.session.queues()) == 1
    await until(lambda: not cluster.session.queues())
    assert ("StopRequest", 1) in cluster.ranks.calls  # the leader has heard: the followers may forget it
    await cluster.session.close()
