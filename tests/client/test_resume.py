"""Requests whose world dies: they go on in the next, without a token more or less, or fail in time with the cause."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allspan.client.session import ResumePolicy, Session
from allspan.protos import worker_pb2 as pb
from allspan.protos.errors import AllspanError, DeadlineExceeded, QueueFull, Unavailable
from allspan.protos.options import RequestOptions
from allspan.protos.results import Output, RequestState, RequestTimings, ResultQueue, TokenLogprob
from allspan.protos.sampling import SamplingParams
from support.fake_transport import FakeRanks, FakeSource, counted

KILLED = "rank 1 (pid 101 on testhost) was killed by SIGKILL"


class Cluster:
    """One replica of two ranks."""

    def __init__(
        self, policy: ResumePolicy | None = None, eos_token_ids: tuple[int, ...] = (), call_timeout: float = 0.5
    ) -> None:
        self.ranks = FakeRanks(2)
        self.eos_token_ids = eos_token_ids
        self.source = FakeSource(self.ranks.info(eos_token_ids=eos_token_ids))
        self.session = Session([self.source], self.ranks.connect, policy, call_timeout)

    async def start(self, max_tokens: int = 4, options: RequestOptions | None = None) -> tuple[bytes, ResultQueue]:
        request_id = uuid.uuid4().bytes
        params = SamplingParams(max_tokens=max_tokens, seed=7)
        return request_id, await self.session.start(request_id, [1, 2, 3], params, options)

    def kill(self, rank: int = 1, will_restart: bool = True) -> None:
        self.ranks[rank].break_stream("Socket closed")
        self.source.info = self.ranks.info("down", KILLED, will_restart=will_restart)

    def restart(self) -> None:
        self.ranks.revive()
        self.source.info = self.ranks.info(eos_token_ids=self.eos_token_ids)

    async def die_and_return(self) -> None:
        """A whole loss: noticed here, and followed by the next epoch."""
        self.kill()
        await until(lambda: self.session.down_cause)
        self.restart()
        await until(lambda: not self.session.down_cause)

    @property
    def sent(self) -> list[pb.StartRequestMessage]:
        """To the leader of the present epoch."""
        return self.ranks[0].requests.get("StartRequest", [])


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allspan.client.replica.REVIVE_POLL_S", 0.002)
    monkeypatch.setattr("allspan.client.replica.CAUSE_POLL_S", 0.001)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    await made.session.attach(5)
    yield made
    await made.session.close()


async def until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.001)


async def tokens_of(queue: ResultQueue) -> list[int]:
    async with asyncio.timeout(5):
        return [token for output in [output async for output in queue] for token in output.token_ids]


async def test_a_request_before_its_first_token_is_sent_again_whole(cluster: Cluster) -> None:
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
async def test_a_stream_goes_on_after_the_tokens_that_its_caller_has(cluster: Cluster, rank: int) -> None:
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
    assert (message.request_id, message.sampling.seed, message.sampling.max_tokens) == (request_id, 7, 4)
    for _ in range(2):
        cluster.ranks.step()
    assert await tokens_of(queue) == [4, 5, 6, 7]
    assert queue.state is RequestState.FINISHED


async def test_a_request_that_comes_back_to_the_world_it_left_has_another_id_there(cluster: Cluster) -> None:
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


async def test_a_world_that_is_replaced_while_it_is_attached_to_is_not_used(cluster: Cluster) -> None:
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


async def test_what_a_lost_world_still_says_is_not_heard(cluster: Cluster) -> None:
    _, queue = await cluster.start()
    cluster.ranks.step()
    await until(lambda: queue.num_tokens == 1)
    cluster.kill(1)
    await until(lambda: cluster.session.down_cause)
    cluster.ranks.step()  # the leader lives still, and its stream is whole
    await asyncio.sleep(0)
    assert queue.num_tokens == 1


@pytest.mark.parametrize(
    ("params", "last", "reason", "stop"),
    [
        (SamplingParams(max_tokens=2, seed=1), 5, "length", None),
        (SamplingParams(max_tokens=9, seed=1, stop_token_ids=(5,)), 5, "stop", 5),
        (SamplingParams(max_tokens=9, seed=1), 999, "stop", 999),
        (SamplingParams(max_tokens=9, seed=1, stop_words_ids=((4, 5),)), 5, "stop", None),
    ],
)
async def test_a_request_that_has_all_its_tokens_ends_as_it_would_have(
    params: SamplingParams, last: int, reason: str, stop: int | None
) -> None:
    cluster = Cluster(eos_token_ids=(999,))
    await cluster.session.attach(5)
    request_id = uuid.uuid4().bytes
    queue = await cluster.session.start(request_id, [1, 2, 3], params)
    timings = RequestTimings(0.1, 0.2, 0.2, 3, 2, 1, 1000.0)
    cluster.ranks[0].send((request_id, Output((4,), timings=timings)), (request_id, Output((last,))))
    await until(lambda: queue.num_tokens == 2)
    cluster.kill(will_restart=False)
    await until(lambda: queue.state.is_final)
    output = await queue.aget(5)
    assert output is not None
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ((4, last), reason, stop)
    assert output.timings is not None
    assert (output.timings.ttft_s, output.timings.cached_tokens, output.timings.output_tokens) == (0.2, 2, 2)
    assert cluster.session.queues() == []
    await cluster.session.close()


async def test_an_end_of_sequence_id_that_is_ignored_ends_nothing() -> None:
    cluster = Cluster(eos_token_ids=(5,))
    await cluster.session.attach(5)
    params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    queue = await cluster.session.start(uuid.uuid4().bytes, [1, 2, 3], params)
    for _ in range(2):
        cluster.ranks.step()
    await until(lambda: queue.num_tokens == 2)
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    cluster.ranks.step()
    assert await tokens_of(queue) == [4, 5, 6]
    await cluster.session.close()


@pytest.mark.parametrize("will_restart", [False, True])
async def test_without_a_world_to_come_requests_fail_at_once_and_with_one_they_wait(
    cluster: Cluster, will_restart: bool
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


async def test_a_run_directory_that_vanishes_ends_the_wait(cluster: Cluster) -> None:
    _, queue = await cluster.start()
    cluster.kill()
    await until(lambda: cluster.session.down_cause == KILLED)
    cluster.source.info = None
    with pytest.raises(Unavailable, match="SIGKILL"):
        await queue.aget(3)


async def test_the_wait_for_a_world_has_an_end() -> None:
    made = Cluster(ResumePolicy(timeout_s=0.1))
    await made.session.attach(5)
    _, queue = await made.start()
    made.kill()
    with pytest.raises(Unavailable, match=r"SIGKILL \(nothing to go on in within 0\.1 s\)"):
        await queue.aget(5)
    assert made.session.queues() == []
    await made.session.close()


async def test_switched_off_it_fails_every_request_with_the_cause() -> None:
    made = Cluster(ResumePolicy(enabled=False))
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
    made = Cluster(ResumePolicy(max_tries=2))
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
    made = Cluster(ResumePolicy(max_tries=1))
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


async def test_a_full_queue_does_not_turn_a_resumed_request_away(cluster: Cluster) -> None:
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


async def test_a_leader_that_gives_its_requests_up_before_it_dies_fails_none(cluster: Cluster) -> None:
    request_id, queue = await cluster.start(max_tokens=2)
    cluster.ranks.step()
    await until(lambda: queue.num_tokens == 1)
    cluster.ranks[0].replies["StartRequest"] = Unavailable("the engine has failed: a peer is gone")
    cluster.ranks[0].fail(request_id, Unavailable("the engine has failed: a peer is gone"))
    await until(lambda: len(cluster.sent) > 1)  # refused, for the time being
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    cluster.ranks.step()
    assert await tokens_of(queue) == [4, 5]


async def test_an_error_of_the_request_itself_is_not_tried_again(cluster: Cluster) -> None:
    request_id, queue = await cluster.start()
    cluster.ranks[0].fail(request_id, DeadlineExceeded("timeout_s is over"))
    with pytest.raises(DeadlineExceeded):
        await queue.aget(5)
    assert len(cluster.sent) == 1


@pytest.mark.parametrize("slow", [0, 1])
async def test_a_request_on_its_way_in_is_neither_lost_nor_doubled(cluster: Cluster, slow: int) -> None:
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


async def test_a_request_on_its_way_in_fails_with_the_cause_when_there_is_no_restart(cluster: Cluster) -> None:
    cluster.ranks[0].replies["StartRequest"] = 60.0
    start = asyncio.create_task(cluster.start())
    await until(lambda: ("StartRequest", 0) in cluster.ranks.calls)
    cluster.kill(1, will_restart=False)
    with pytest.raises(Unavailable, match=r"^rank 1 .* was killed by SIGKILL$"):
        await asyncio.wait_for(start, 3)
    assert cluster.session.queues() == []


async def test_a_world_that_dies_while_requests_are_sent_to_it_again_is_one_more_loss(cluster: Cluster) -> None:
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
async def test_a_request_that_is_stopped_between_two_worlds_ends_there(cluster: Cluster, way: str) -> None:
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


async def test_a_request_that_was_stopped_is_not_resumed(cluster: Cluster) -> None:
    request_id, queue = await cluster.start()
    await cluster.session.stop(request_id)
    cluster.kill()
    output = await queue.aget(5)
    assert output is not None
    assert output.finish_reason == "cancelled"


async def test_a_request_stopped_while_it_is_sent_again_is_stopped_there(cluster: Cluster) -> None:
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


async def test_what_is_left_of_the_time_is_sent(cluster: Cluster) -> None:
    await cluster.start(options=RequestOptions(timeout_s=60.0, priority=-3, cache_salt="a"))
    assert cluster.sent[0].timeout_s == pytest.approx(60.0, abs=5.0)
    first = cluster.sent[0].timeout_s
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    message = cluster.sent[0]
    assert 0 < message.timeout_s < first
    assert (message.priority, message.cache_salt) == (-3, "a")


async def test_a_request_runs_out_of_time_between_two_worlds(cluster: Cluster) -> None:
    _, queue = await cluster.start(options=RequestOptions(timeout_s=0.1))
    cluster.kill()
    with pytest.raises(DeadlineExceeded, match=r"timeout_s \(0\.1 s\)"):
        await queue.aget(5)


async def test_timings_are_those_that_the_caller_sees(cluster: Cluster) -> None:
    request_id, queue = await cluster.start()
    first = RequestTimings(0.1, 0.2, 0.2, 3, 2, 1, 1000.0, 1, 1)
    cluster.ranks[0].send((request_id, Output((4,), timings=first)))
    await until(lambda: queue.num_tokens == 1)
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    second = RequestTimings(0.5, 0.6, 0.6, 3, 0, 2, 2000.0, 0, 0)
    cluster.ranks[0].send((request_id, Output((5,), timings=second)))
    await until(lambda: queue.num_tokens == 2)
    assert queue.timings == first
    end = RequestTimings(0.5, 0.6, 0.9, 3, 0, 3, 2000.0, 0, 2)
    cluster.ranks[0].send((request_id, Output((6,), finish_reason="stop", timings=end)))
    await until(lambda: queue.state.is_final)
    seen = queue.timings
    assert seen is not None
    assert seen.total_s > 0.9
    assert (seen.queue_s, seen.ttft_s, seen.arrived_at, seen.cached_tokens) == (0.1, 0.2, 1000.0, 2)
    assert (seen.output_tokens, seen.preemptions, seen.host_cached_tokens) == (3, 3, 1)


async def test_a_first_token_in_the_second_world_took_as_long_as_both(cluster: Cluster) -> None:
    request_id, queue = await cluster.start()
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    cluster.ranks[0].send((request_id, Output((4,), timings=RequestTimings(0.5, 0.6, 0.6, 3, 1, 1, 2000.0))))
    await until(lambda: queue.num_tokens == 1)
    seen = queue.timings
    assert seen is not None
    assert seen.queue_s > 0.5
    assert seen.ttft_s > 0.6
    assert seen.ttft_s - seen.queue_s == pytest.approx(0.1)
    assert seen.arrived_at == pytest.approx(2000.6 - seen.ttft_s)


def logprobs(*values: float) -> tuple[TokenLogprob, ...]:
    return tuple(map(TokenLogprob, values))


async def test_prompt_logprobs_come_once(cluster: Cluster) -> None:
    request_id = uuid.uuid4().bytes
    params = SamplingParams(max_tokens=2, seed=1, logprobs=0, prompt_logprobs=0)
    queue = await cluster.session.start(request_id, [1, 2, 3, 4], params)
    cluster.ranks[0].send((request_id, Output(prompt_logprobs=logprobs(-1.0))))
    await until(lambda: queue._pending)
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    assert cluster.sent[0].sampling.prompt_logprobs == 0
    cluster.ranks[0].send((request_id, Output(prompt_logprobs=logprobs(-1.0, -2.0))))
    cluster.ranks[0].send((request_id, Output((9,), logprobs(-0.5), prompt_logprobs=logprobs(-3.0))))
    await until(lambda: queue.num_tokens == 1)
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    assert cluster.sent[0].sampling.prompt_logprobs == -1  # all have come: not computed again
    assert cluster.sent[0].sampling.logprobs == 0
    cluster.ranks[0].send((request_id, Output((8,), logprobs(-0.25), "length")))
    await until(lambda: queue.state.is_final)
    output = await queue.aget(1)
    assert output is not None
    assert output.token_ids == (9, 8)
    assert output.logprobs == logprobs(-0.5, -0.25)
    assert output.prompt_logprobs == logprobs(-1.0, -2.0, -3.0)


async def test_closing_ends_requests_that_wait_for_a_world(cluster: Cluster) -> None:
    _, queue = await cluster.start()
    cluster.kill()
    await until(lambda: cluster.session.down_cause == KILLED)
    await cluster.session.close()
    with pytest.raises(AllspanError, match="closed"):
        queue.get_nowait()


async def test_a_leader_that_never_answers_about_a_request_does_not_keep_it_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allspan.client.session.LAST_WORDS_S", 0.01)
    cluster = Cluster(call_timeout=0.05)
    await cluster.session.attach(5)
    cluster.ranks[0].replies["StartRequest"] = 60.0
    with pytest.raises(DeadlineExceeded):
        await cluster.start()
    assert len(cluster.session.queues()) == 1
    await until(lambda: not cluster.session.queues())
    assert ("StopRequest", 1) in cluster.ranks.calls  # the leader has heard: the followers may forget it
    await cluster.session.close()


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
        self.cluster = Cluster(ResumePolicy(max_tries=1000))
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
