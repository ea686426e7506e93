"""A rank's service over a real unix socket, with a scripted core behind it."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import ConfigError, InternalError, QueueFull, TooManyAdapters, Unavailable
from allspan.protos.api.results import Output, RequestTimings, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.convert import output_from_wire
from allspan.protos.worker_pb2_grpc import WorkerStub
from allspan.worker.cache.page_log import PageLog
from allspan.worker.service.call_queue import MOST_CALLS
from allspan.worker.service.server import RankServer, listen_target
from allspan.worker.service.servicer import RankFacts
from support.fake_core import FakeCore
from support.served_rank import (
    EPOCH,
    ID,
    OTHER_ID,
    Client,
    Rank,
    connected,
    inspect,
    refused,
    start_message,
    worker_config,
)
from support.waiting import wait_until


async def test_a_request_reaches_the_core_and_its_tokens_come_back_in_one_stream(leader: Rank, client: Client) -> None:
    await client.subscribe()
    await client.stub.StartRequest(start_message())
    (request,) = leader.core.submitted
    assert (request.request_id, request.client_id, request.prompt_token_ids) == (ID, "me", (1, 2, 3))
    assert request.params == SamplingParams(max_tokens=4, seed=9)
    logprob = TokenLogprob(-0.5, ((7, -0.5), (8, -1.0)))
    timings = RequestTimings(0.1, 0.2, 0.3, 3, 0, 2)
    leader.deliver(request, Output((7,), (logprob,)))
    message = await client.read()
    assert (message.epoch, message.step, message.progress) == (EPOCH, 3, 7)
    assert message.outputs[0].request_id == ID
    assert output_from_wire(message.outputs[0]).token_ids == (7,)
    leader.deliver(request, Output((2,), (logprob,), "stop", 2, timings))
    last = output_from_wire((await client.read()).outputs[0])
    assert (last.finish_reason, last.stop_token_id, last.timings) == ("stop", 2, timings)


async def test_a_stream_that_asks_for_pages_gets_them_all_and_then_what_changes(leader: Rank, client: Client) -> None:
    log = leader.core.page_log = PageLog(2)
    keys = [i.to_bytes(16, "little") for i in range(1, 1501)]
    log.store(keys[0], is_host=False)
    first = await anext(aiter(client.stub.Results(pb.ResultsSubscription(client_id="none"))))
    assert (first.load.queued_tokens, list(first.page_events)) == (300, [])
    for key in keys:
        log.store(key, is_host=False)
    stream = aiter(client.stub.Results(pb.ResultsSubscription(client_id="keys", page_events=1, heartbeat_ms=60_000)))
    parts = [(await asyncio.wait_for(anext(stream), 5)).page_events[0] for _ in range(2)]
    assert [(part.sequence, part.cleared, len(part.stored), part.page_tokens) for part in parts] == [
        (0, True, 1024, 2),
        (1, False, 476, 2),
    ]
    await client.stub.ResendPages(pb.ResendPagesRequest(client_id="keys"))
    again = (await asyncio.wait_for(anext(stream), 5)).page_events[0]
    assert (again.sequence, again.cleared, len(again.stored)) == (2, True, 1024)
    with pytest.raises(grpc.aio.AioRpcError, match="'nobody' has no open Results stream"):
        await client.stub.ResendPages(pb.ResendPagesRequest(client_id="nobody"))
    with pytest.raises(grpc.aio.AioRpcError, match="page_events is 3, must be 0"):
        await anext(aiter(client.stub.Results(pb.ResultsSubscription(client_id="other", page_events=3))))


async def test_a_failed_request_carries_its_tokens_then_its_error(leader: Rank, client: Client) -> None:
    await client.subscribe()
    await client.stub.StartRequest(start_message())
    (request,) = leader.core.submitted
    leader.deliver(request, Output((7,)), InternalError("it broke"))
    outputs = list((await client.read()).outputs)
    assert [list(output.token_ids) for output in outputs] == [[7], []]
    assert (outputs[1].error_code, outputs[1].error_message) == ("internal", "it broke")


async def test_what_a_slow_reader_leaves_is_merged_request_by_request(leader: Rank, client: Client) -> None:
    await client.subscribe()
    await client.stub.StartRequest(start_message())
    await client.stub.StartRequest(start_message(request_id=OTHER_ID))
    first, second = leader.core.submitted
    leader.server.deliver([(request, Output((i,))) for i in range(500) for request in (first, second)])
    tokens: dict[bytes, list[int]] = {ID: [], OTHER_ID: []}
    messages = 0
    while min(map(len, tokens.values())) < 500:
        messages += 1
        for output in (await client.read()).outputs:
            tokens[output.request_id].extend(output.token_ids)
    assert tokens == {ID: list(range(500)), OTHER_ID: list(range(500))}
    assert messages < 5


async def test_heartbeats_come_while_nothing_happens_and_carry_the_progress(leader: Rank, client: Client) -> None:
    await client.subscribe(heartbeat_ms=50)
    assert (await client.read()).progress == 7
    leader.core.progress = 8
    while (await client.read()).progress != 8:
        pass


@pytest.mark.parametrize("how", ["cancel", "connection lost"])
async def test_the_end_of_the_stream_cancels_what_is_still_open(leader: Rank, client: Client, how: str) -> None:
    await client.subscribe()
    await client.stub.StartRequest(start_message())
    await client.stub.StartRequest(start_message(request_id=OTHER_ID))
    leader.deliver(leader.core.submitted[0], Output((1,), (), "length"))
    await client.read()
    if how == "cancel":
        client.stream.cancel()
    else:
        await client.channel.close()
    await asyncio.to_thread(wait_until, lambda: leader.core.cancelled, 10, "the cancellation")
    assert leader.core.cancelled == [OTHER_ID]


async def test_a_client_may_come_back_after_its_stream_ended(leader: Rank, client: Client) -> None:
    await client.subscribe()
    assert (await refused(client.stub.Results(pb.ResultsSubscription(client_id="me")).read()))[0] == "ALREADY_EXISTS"
    await client.stub.StartRequest(start_message())
    client.stream.cancel()
    await asyncio.to_thread(wait_until, lambda: leader.core.cancelled, 10, "the cancellation")
    await client.subscribe()


@pytest.mark.parametrize(
    ("changes", "status", "field", "words"),
    [
        ({"epoch": EPOCH - 1}, "UNAVAILABLE", None, "epoch 5"),
        ({"model": "gpt"}, "NOT_FOUND", None, "'gpt'"),
        ({"request_id": b"short"}, "INVALID_ARGUMENT", "request_id", "5 bytes"),
        ({"client_id": "stranger"}, "INVALID_ARGUMENT", "client_id", "'stranger'"),
        ({"sampling": b""}, "INVALID_ARGUMENT", "sampling", "missing"),
        ({"sampling": b'{"max_tokens":0}'}, "INVALID_ARGUMENT", "max_tokens", "max_tokens is 0"),
        ({"sampling": b'{"temperature":NaN}'}, "INVALID_ARGUMENT", "temperature", "nan"),
        ({"sampling": b"[" * 100_000}, "INVALID_ARGUMENT", "sampling", "not a JSON object"),
        ({"sampling": b'{"beams":4}'}, "INVALID_ARGUMENT", "sampling", "fields of SamplingParams"),
        ({"sampling": b'{"grammar":["regex"]}'}, "INVALID_ARGUMENT", "grammar", "its kind and its text"),
        ({"adapter": "a" * 129}, "INVALID_ARGUMENT", "adapter", "129 characters"),
    ],
)
async def test_a_bad_request_is_refused_by_name(
    leader: Rank, client: Client, changes: dict[str, Any], status: str, field: str | None, words: str
) -> None:
    await client.subscribe()
    code, message, trailing = await refused(client.stub.StartRequest(start_message(**changes)))
    assert code == status
    assert words in message
    assert trailing.get("allspan-field") == field
    assert not leader.core.submitted
    await client.stub.StartRequest(start_message())


async def test_a_request_has_its_adapters_name_and_digest(leader: Rank, client: Client) -> None:
    await client.subscribe()
    for name, digest, request_id in (("b", 9, ID), ("", 0, OTHER_ID)):
        await client.stub.StartRequest(start_message(adapter=name, adapter_digest=digest, request_id=request_id))
    assert [(each.adapter, each.options.adapter) for each in leader.core.submitted] == [(9, "b"), (-1, "")]
    told = (await client.stub.Status(pb.StatusRequest())).adapters
    found = [(each.name, each.path, each.base_model_name, each.digest) for each in told]
    assert found == [("sql", "/a", "", 8), ("b", "/c", "tiny", 9)]


async def test_adapters_come_and_go_by_calls_to_the_leader(leader: Rank, follower: Rank, client: Client) -> None:
    first = await client.subscribe()
    assert [each.name for each in first.adapters.adapters] == ["sql", "b"]
    load = pb.LoadAdapterRequest(adapter=pb.Adapter(name="law", path="/law", digest=5), timeout_s=9)
    told = (await client.stub.LoadAdapter(load)).adapters
    assert [(each.name, each.digest) for each in told.adapters] == [("sql", 8), ("b", 9), ("law", 5)]
    heard = (await client.read()).adapters  # long before a heartbeat
    assert (heard.version, [each.name for each in heard.adapters]) == (told.version, ["sql", "b", "law"])
    leader.core.adapters.num_requests = 3
    reply = await client.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="sql", timeout_s=4))
    assert ([each.name for each in reply.adapters.adapters], reply.num_requests) == (["b", "law"], 3)
    assert reply.adapters.version > told.version > first.adapters.version
    assert leader.core.calls == ["load law 9.0", "unload sql 4.0"]
    leader.core.adapters.rejection = TooManyAdapters("2 adapters are loaded")
    code, _, trailing = await refused(client.stub.LoadAdapter(load))
    assert (code, trailing["allspan-code"]) == ("RESOURCE_EXHAUSTED", "too_many_adapters")


async def test_loads_that_wait_keep_no_other_call_waiting(leader: Rank, client: Client) -> None:
    leader.core.adapters.may_load.clear()
    load = pb.LoadAdapterRequest(adapter=pb.Adapter(name="law", path="/law", digest=5), timeout_s=60)
    loads = [asyncio.ensure_future(client.stub.LoadAdapter(load)) for _ in range(2 * MOST_CALLS)]
    done, waiting = await asyncio.wait(loads, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    while len(done) < MOST_CALLS:
        done |= (await asyncio.wait(waiting - done, timeout=10, return_when=asyncio.FIRST_COMPLETED))[0]
    assert {(await refused(each))[2]["allspan-code"] for each in done} == {"queue_full"}
    await client.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="sql", timeout_s=4))
    await client.stub.Control(pb.ControlRequest(operation="start_model"))
    assert leader.core.calls == ["unload sql 4.0", "start_model"]
    leader.core.adapters.may_load.set()
    for each in waiting - done:
        await each
    assert leader.core.calls[2:] == ["load law 60.0"] * MOST_CALLS


async def test_a_message_that_is_no_protobuf_harms_nobody(leader: Rank, client: Client) -> None:
    await client.subscribe()
    raw = client.channel.unary_unary("/allspan.worker.v1.Worker/StartRequest")
    code, message, _ = await refused(raw(start_message().SerializeToString()[:-3]))
    assert (code, message) == ("INVALID_ARGUMENT", "the message is not the protobuf that this method takes")
    await client.stub.StartRequest(start_message())
    assert len(leader.core.submitted) == 1


async def test_what_the_core_refuses_has_its_status_and_code(leader: Rank, client: Client) -> None:
    await client.subscribe()
    leader.core.rejection = QueueFull("1024 requests wait")
    code, message, trailing = await refused(client.stub.StartRequest(start_message()))
    assert (code, message, trailing["allspan-code"]) == ("RESOURCE_EXHAUSTED", "1024 requests wait", "queue_full")
    leader.core.rejection = None
    await client.stub.StartRequest(start_message())


async def test_stop_request_cancels_and_checks_its_ids(leader: Rank, client: Client) -> None:
    await client.stub.StopRequest(pb.RequestIds(request_ids=[ID, OTHER_ID]))
    assert leader.core.cancelled == [ID, OTHER_ID]
    code, _, trailing = await refused(client.stub.StopRequest(pb.RequestIds(request_ids=[b"x"])))
    assert (code, trailing["allspan-field"]) == ("INVALID_ARGUMENT", "request_id")


async def test_stopping_delivers_what_is_left_then_ends_the_streams(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    async for client in connected(rank):
        await client.subscribe()
        await client.stub.StartRequest(start_message())
        rank.deliver(rank.core.submitted[0], Unavailable("the engine is shutting down"))
        await asyncio.to_thread(rank.server.stop)
        (output,) = (await client.read()).outputs
        assert (output.error_code, output.error_message) == ("unavailable", "the engine is shutting down")
        while (message := await asyncio.wait_for(client.stream.read(), 10)) is not grpc.aio.EOF:
            assert not message.outputs, "a heartbeat"


def test_the_socket_is_its_owners_alone(leader: Rank) -> None:
    path = Path(leader.address.removeprefix("unix:"))
    assert path.name == "r0.e5.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80)
    with pytest.raises(ConfigError, match="at most 100"):
        listen_target(worker_config(deep), 0)


def test_an_address_that_others_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a loopback address: without certificates"):
        listen_target(worker_config(tmp_path, "0.0.0.0"), 0)
    assert listen_target(worker_config(tmp_path, "::1"), 0) == "[::1]:0"


async def test_a_loopback_port_is_published(tmp_path: Path) -> None:
    config = worker_config(tmp_path, "127.0.0.1")
    facts = RankFacts(0, 1, "here", 512, 1000, (), "reference", "", "0", 1, 0.0, 0, 0)
    server = RankServer(FakeCore(), facts, config, lambda error: None, inspect)
    try:
        async with grpc.aio.insecure_channel(server.start()) as channel:
            assert (await WorkerStub(channel).Status(pb.StatusRequest())).world_size == 1
    finally:
        server.stop()


def test_a_place_that_cannot_be_listened_on_is_named(tmp_path: Path) -> None:
    facts = RankFacts(0, 1, "here", 512, 1000, (), "reference", "", "0", 1, 0.0, 0, 0)
    server = RankServer(FakeCore(), facts, worker_config(tmp_path / "missing"), lambda error: None, inspect)
    with pytest.raises(ConfigError, match="cannot listen on unix:"):
        server.start()
