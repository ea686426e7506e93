"""ClientEngine against a cluster of fake ranks behind real gRPC services."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.errors import (
    AllspanError,
    AlreadyExists,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    Unavailable,
)
from allspan.protos.api.results import RequestState
from support.fake_worker import FakeCluster
from support.waiting import wait_until


def leader_requests(cluster: FakeCluster) -> int:
    return len(cluster.ranks[0].requests)


def test_a_request_streams_its_tokens_and_timings(engine: ClientEngine) -> None:
    handle, queue = engine.start_request([10, 20], SamplingParams(max_tokens=3))
    outputs = list(queue)
    assert [token for output in outputs for token in output.token_ids] == [21, 22, 23]
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].timings is not None
    assert outputs[-1].timings.prompt_tokens == 2
    assert len(handle.request_id) == 32


def test_generate_returns_completions_in_the_order_of_the_prompts(engine: ClientEngine) -> None:
    lengths = [40, 1, 17, 3]
    prompts = [[i, 100 * i] for i in range(1, 5)]
    results = engine.generate(prompts, [SamplingParams(max_tokens=n) for n in lengths])
    for prompt, length, result in zip(prompts, lengths, results, strict=True):
        assert result.prompt_token_ids == tuple(prompt)
        assert result.token_ids == tuple(prompt[-1] + 1 + i for i in range(length))
        assert result.finish_reason == "length"


def test_text_prompts_are_tokenised_and_answers_are_text(engine: ClientEngine) -> None:
    (result,) = engine.generate("xyzA", SamplingParams(max_tokens=4))
    assert result.prompt_token_ids == tuple(b"xyzA")
    assert result.text == "BCDE"


def test_a_list_of_integers_is_one_prompt_and_no_prompt_is_none(engine: ClientEngine) -> None:
    assert len(engine.generate([1, 2, 3], SamplingParams(max_tokens=1))) == 1
    assert engine.generate([]) == []


def test_a_stop_string_cuts_the_text_and_ends_the_request(cluster: FakeCluster, engine: ClientEngine) -> None:
    (result,) = engine.generate("A", SamplingParams(max_tokens=200, stop=("EF",)))
    assert (result.text, result.finish_reason, result.token_ids) == ("BCD", "stop", tuple(b"BCDEF"))
    wait_until(lambda: not leader_requests(cluster), what="the end of the request on the leader")


def test_stop_tokens_and_logprobs_travel(engine: ClientEngine) -> None:
    (result,) = engine.generate("A", SamplingParams(max_tokens=9, stop_token_ids=(ord("D"),), logprobs=2))
    assert (result.text, result.finish_reason) == ("BC", "stop")
    assert [len(entry.top) for entry in result.logprobs] == [2, 2, 2]


def test_missing_seeds_are_drawn_and_differ(cluster: FakeCluster, engine: ClientEngine) -> None:
    cluster.paused = True
    for _ in range(3):
        engine.start_request([1], None)
    engine.start_request([1], SamplingParams(seed=5))
    seeds = [[r.sampling.seed for r in rank.requests.values()] for rank in cluster.ranks]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4
    assert seeds[0][-1] == 5


def test_a_full_queue_is_waited_for_by_generate_but_not_by_start_request(
    cluster: FakeCluster, engine: ClientEngine
) -> None:
    cluster.ranks[0].refusal = QueueFull("1024 requests wait, at most 1024")
    with pytest.raises(QueueFull, match="1024 requests wait"):
        engine.start_request([1])
    tried = len(cluster.events)
    results = []
    thread = threading.Thread(target=lambda: results.extend(engine.generate([1], SamplingParams(max_tokens=2))))
    thread.start()
    wait_until(lambda: len(cluster.events) > tried + 2, what="a refused try")
    cluster.ranks[0].refusal = None
    thread.join(10)
    assert [result.token_ids for result in results] == [(2, 3)]


def test_generate_gives_up_when_the_queue_stays_full(
    cluster: FakeCluster, engine: ClientEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allspan.protos.api.batch_generate.QUEUE_WAIT_S", 0.1)
    cluster.ranks[1].refusal = QueueFull("full")
    with pytest.raises(QueueFull, match="full"):
        engine.generate([[1], [2]])


def test_one_refused_prompt_ends_the_call_and_the_others(cluster: FakeCluster, engine: ClientEngine) -> None:
    cluster.paused = True
    result: list[Exception] = []

    def call() -> None:
        try:
            engine.generate([[1], [2]], SamplingParams(max_tokens=5))
        except Unavailable as error:
            result.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: leader_requests(cluster) == 2)
    cluster.kill(1, "rank 1 (pid 70001 on testhost) was killed by SIGKILL")
    thread.join(10)
    assert [str(error) for error in result] == ["rank 1 (pid 70001 on testhost) was killed by SIGKILL"]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "prompt is empty"),
        ("", "prompt is empty"),
        ([1, -1], r"prompt\[1\] is token id -1, must be from 0 to 999"),
        ([1000], r"prompt\[0\] is token id 1000, must be from 0 to 999"),
        ([1, 2.5], r"prompt\[1\] is 2.5, must be a token id"),
        ([True], r"prompt\[0\] is True, must be a token id"),
        ([1] * 256, r"prompt has 256 tokens, at most 255 leave room"),
        (None, "prompts? is None, must be text or a list of token ids"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_sent(
    cluster: FakeCluster, engine: ClientEngine, prompt: object, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        engine.start_request(prompt)  # type: ignore[arg-type]
    if prompt:
        with pytest.raises(InvalidRequest, match=words):
            engine.generate([[1], prompt] if prompt is not None else prompt)  # type: ignore[arg-type]
    assert not [event for event in cluster.events if event[0] == "start"]


def test_bad_parameters_and_ids_are_refused(engine: ClientEngine) -> None:
    with pytest.raises(InvalidRequest, match="2 entries for 1 prompts"):
        engine.generate([[1]], [SamplingParams(), SamplingParams()])
    with pytest.raises(InvalidRequest, match="request_id is 'abc'"):
        engine.start_request([1], request_id="abc")


@pytest.mark.parametrize(
    "refusal",
    [ConfigError("a"), CheckpointError("b"), QueueFull("c"), InternalError("d"), InvalidRequest("e", "top_p")],
)
def test_a_ranks_refusal_reaches_the_caller_as_what_it_is(
    cluster: FakeCluster, engine: ClientEngine, refusal: AllspanError
) -> None:
    cluster.ranks[1].refusal = refusal
    with pytest.raises(type(refusal), match=f"^{refusal.message}$") as raised:
        engine.start_request([1])
    assert getattr(raised.value, "field", None) == getattr(refusal, "field", None)
    assert engine.is_ready


def test_a_request_id_is_the_callers_and_is_unique_while_in_use(cluster: FakeCluster, engine: ClientEngine) -> None:
    cluster.paused = True
    name = "0123456789abcdef" * 2
    handle, queue = engine.start_request([1], SamplingParams(max_tokens=1), name)
    assert handle.request_id == name
    with pytest.raises(AlreadyExists, match=name):
        engine.start_request([1], None, name)
    cluster.paused = False
    assert queue.wait_finished(10)
    _, again = engine.start_request([1], SamplingParams(max_tokens=1), name)
    assert again.wait_finished(10)


def test_sync_waits_for_one_or_all_within_its_time(cluster: FakeCluster, engine: ClientEngine) -> None:
    cluster.paused = True
    handle, queue = engine.start_request([1], SamplingParams(max_tokens=3))
    _, other = engine.start_request([1], SamplingParams(max_tokens=30))
    for target in (handle, None):
        with pytest.raises(DeadlineExceeded, match=r"timeout \(0.05 s\)"):
            engine.sync_request(target, timeout=0.05)
    cluster.paused = False
    engine.sync_request(handle, timeout=10)
    assert queue.state is RequestState.FINISHED
    engine.sync_request(timeout=10)
    assert other.state is RequestState.FINISHED
    engine.sync_request(timeout=0)


def test_stopping_keeps_what_was_generated(cluster: FakeCluster, engine: ClientEngine) -> None:
    handle, queue = engine.start_request([1], SamplingParams(max_tokens=200))
    wait_until(lambda: queue.num_tokens >= 3)
    engine.stop_request(handle)
    engine.stop_request(handle)
    outputs = list(queue)
    assert outputs[-1].finish_reason == "cancelled"
    assert queue.state is RequestState.CANCELLED
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == list(range(2, 2 + len(tokens)))
    assert len(tokens) >= 3


def test_releasing_a_running_request_stops_it(cluster: FakeCluster, engine: ClientEngine) -> None:
    cluster.paused = True
    handle, queue = engine.start_request([1], SamplingParams(max_tokens=200))
    engine.release_request(handle)
    assert queue.state is RequestState.CANCELLED
    wait_until(lambda: not leader_requests(cluster), what="the end of the request on the leader")
    engine.release_request(handle)


async def test_cancelling_agenerate_stops_its_requests(cluster: FakeCluster, engine: ClientEngine) -> None:
    cluster.paused = True
    call = asyncio.create_task(engine.agenerate([[1], [2], [3]], SamplingParams(max_tokens=200)))
    async with asyncio.timeout(10):
        while leader_requests(cluster) < 3:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while leader_requests(cluster):
            await asyncio.sleep(0.005)


async def test_the_async_twins_do_the_same(engine: ClientEngine) -> None:
    (result,) = await engine.agenerate("A", SamplingParams(max_tokens=2))
    assert result.text == "BC"
    handle, queue = await engine.astart_request("A", SamplingParams(max_tokens=250 - 1))
    await engine.astop_request(handle)
    assert [output async for output in queue][-1].finish_reason == "cancelled"
    assert (await engine.astatistics()).model == "fake"


def test_statistics_have_an_entry_for_each_rank(engine: ClientEngine) -> None:
    engine.generate([1], SamplingParams(max_tokens=5))
    found = engine.statistics()
    assert (found.model, found.max_model_len, found.generated_tokens, found.finished_requests) == ("fake", 256, 5, 1)
    assert [(rank.rank, rank.pid, rank.peak_rss_bytes, rank.load_s) for rank in found.ranks] == [
        (0, 70000, 1000, 0.5),
        (1, 70001, 2000, 1.5),
    ]


def test_starting_and_stopping_the_model_is_the_leaders_to_carry_out(
    cluster: FakeCluster, engine: ClientEngine
) -> None:
    engine.stop_model(timeout=5)
    engine.start_model()
    assert [event for event in cluster.events if event[0].endswith("_model")] == [
        ("stop_model", 0, ""),
        ("start_model", 0, ""),
    ]


@pytest.mark.parametrize(
    ("name", "path", "field"), [("law", os.fsdecode(b"/a\xff"), "lora_path"), ("\ud800", "/a", "lora_name")]
)
def test_an_adapter_of_names_that_cannot_be_sent_is_refused(
    name: str, path: str, field: str, engine: ClientEngine
) -> None:
    with pytest.raises(
        InvalidRequest, match=r"which is not UTF-8 at character .: rename it, or give a link"
    ) as refused:
        engine.load_lora(name, path)
    assert refused.value.field == field
    assert refused.value.message.isprintable()


def test_many_threads_share_one_engine(engine: ClientEngine) -> None:
    results: dict[int, tuple[int, ...]] = {}

    def call(i: int) -> None:
        results[i] = engine.generate([[i]], SamplingParams(max_tokens=20))[0].token_ids

    threads = [threading.Thread(target=call, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {i: tuple(range(i + 1, i + 21)) for i in range(16)}


def test_a_dead_rank_fails_requests_in_time_and_the_next_epoch_is_found(
    cluster: FakeCluster, engine: ClientEngine
) -> None:
    cluster.paused = True
    _, queue = engine.start_request([1])
    started = time.monotonic()
    cluster.kill(1, "the memory is full")
    with pytest.raises(Unavailable, match=r"the memory is full \(rank 1 \(pid 70001 on testhost\) is gone"):
        queue.get(timeout=10)
    assert time.monotonic() - started < 3.0
    assert not engine.is_ready
    cluster.write("down", "rank 1 (pid 70001 on testhost) was killed by SIGKILL")
    wait_until(lambda: engine.down_cause.endswith("SIGKILL"), what="the supervisor's last word")
    with pytest.raises(Unavailable, match="was killed by SIGKILL"):
        engine.start_request([1])
    cluster.paused = False
    cluster.start_epoch()
    wait_until(lambda: engine.is_ready, what="the next epoch")
    assert engine.generate([1], SamplingParams(max_tokens=2))[0].token_ids == (2, 3)
