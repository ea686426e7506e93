"""What the caller of a resumed request sees beside its tokens: its end, its time, its timings, its logprobs."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from allspan.protos.api.errors import DeadlineExceeded
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output, RequestTimings, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.convert import sampling_from_wire
from support.mortal_cluster import MortalCluster, tokens_of, until

pytestmark = pytest.mark.usefixtures("fast_polls")


@pytest.fixture
async def cluster() -> AsyncIterator[MortalCluster]:
    made = MortalCluster()
    await made.session.attach(5)
    yield made
    await made.session.close()


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
    cluster = MortalCluster(eos_token_ids=(999,))
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
    cluster = MortalCluster(eos_token_ids=(5,))
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


async def test_what_is_left_of_the_time_is_sent(cluster: MortalCluster) -> None:
    await cluster.start(options=RequestOptions(timeout_s=60.0, priority=-3, cache_salt="a"))
    assert cluster.sent[0].timeout_s == 60.0, "the leader counts from here, and names the caller's own value"
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    message = cluster.sent[0]
    assert 0 < message.timeout_s < 60.0
    assert (message.priority, message.cache_salt) == (-3, "a")


async def test_a_request_runs_out_of_time_between_two_worlds(cluster: MortalCluster) -> None:
    _, queue = await cluster.start(options=RequestOptions(timeout_s=0.1))
    cluster.kill()
    with pytest.raises(DeadlineExceeded, match=r"timeout_s \(0\.1 s\)"):
        await queue.aget(5)


async def test_timings_are_those_that_the_caller_sees(cluster: MortalCluster) -> None:
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


async def test_a_first_token_in_the_second_world_took_as_long_as_both(cluster: MortalCluster) -> None:
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


async def test_prompt_logprobs_come_once(cluster: MortalCluster) -> None:
    request_id = uuid.uuid4().bytes
    params = SamplingParams(max_tokens=2, seed=1, logprobs=0, prompt_logprobs=0)
    queue = await cluster.session.start(request_id, [1, 2, 3, 4], params)
    cluster.ranks[0].send((request_id, Output(prompt_logprobs=logprobs(-1.0))))
    await until(lambda: queue._pending)
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    assert sampling_from_wire(cluster.sent[0].sampling).prompt_logprobs == 0
    cluster.ranks[0].send((request_id, Output(prompt_logprobs=logprobs(-1.0, -2.0))))
    cluster.ranks[0].send((request_id, Output((9,), logprobs(-0.5), prompt_logprobs=logprobs(-3.0))))
    await until(lambda: queue.num_tokens == 1)
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    assert sampling_from_wire(cluster.sent[0].sampling).prompt_logprobs is None  # all have come: not computed again
    assert sampling_from_wire(cluster.sent[0].sampling).logprobs == 0
    cluster.ranks[0].send((request_id, Output((8,), logprobs(-0.25), "length")))
    await until(lambda: queue.state.is_final)
    output = await queue.aget(1)
    assert output is not None
    assert output.token_ids == (9, 8)
    assert output.logprobs == logprobs(-0.5, -0.25)
    assert output.prompt_logprobs == logprobs(-1.0, -2.0, -3.0)
