"""A rank's service over a real unix socket, with a scripted core behind it."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from allspan.protos import worker_pb2 as pb
from allspan.protos.config import ModelConfig, ServiceConfig, WorkerConfig
from allspan.protos.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    Unavailable,
)
from allspan.protos.options import RequestOptions
from allspan.protos.results import Output, RequestTimings, TokenLogprob
from allspan.protos.sampling import SamplingParams
from allspan.protos.wire import CHANNEL_OPTIONS, output_from_wire, sampling_to_wire
from allspan.protos.worker_pb2_grpc import WorkerStub
from allspan.worker.engine.core import CoreStatistics
from allspan.worker.scheduler.request import Request
from allspan.worker.service.server import RankServer, listen_target
from allspan.worker.service.servicer import RankFacts
from support.fake_core import FakeCore
from support.waiting import wait_until

ID = bytes(range(16))
OTHER_ID = bytes(range(16, 32))
EPOCH = 5


def worker_config(run_dir: Path, host: str = "") -> WorkerConfig:
    return WorkerConfig(ModelConfig("/models/tiny", "tiny"), ServiceConfig(str(run_dir), EPOCH, host))


def inspect(what: str) -> dict[str, Any]:
    if what != "version":
        raise InvalidRequest(f"what is {what!r}", "what")
    return {"version": '1 (kernels "cpu")'}


class Rank:
    """A served fake core, and the means to talk to it."""

    def __init__(self, run_dir: Path, is_leader: bool = True) -> None:
        self.core = FakeCore(is_leader)
        self.failures: list[BaseException] = []
        facts = RankFacts(0 if is_leader else 1, 2, "here", 512, 1000, (2, 3), "reference", 1.5, 100, 200)
        self.server = RankServer(self.core, facts, worker_config(run_dir), self.failures.append, inspect)
        self.address = self.server.start()

    def deliver(self, request: Request, *results: Any) -> None:
        self.server.deliver([(request, result) for result in results])


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.server.stop()
    assert not rank.failures


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path, is_leader=False)
    yield rank
    rank.server.stop()
    assert not rank.failures


class Client:
    """Stub and Results stream of one client."""

    def __init__(self, rank: Rank) -> None:
        self.channel = grpc.aio.insecure_channel(rank.address, options=CHANNEL_OPTIONS)
        self.stub = WorkerStub(self.channel)
        self.stream: Any = None

    async def subscribe(self, heartbeat_ms: int = 60_000) -> pb.StepOutputs:
        self.stream = self.stub.Results(pb.ResultsSubscription(client_id="me", heartbeat_ms=heartbeat_ms))
        first = await self.read()
        assert not first.outputs
        return first

    async def read(self) -> pb.StepOutputs:
        message = await asyncio.wait_for(self.stream.read(), 10)
        assert message is not grpc.aio.EOF
        return message


async def connected(rank: Rank) -> AsyncIterator[Client]:
    client = Client(rank)
    yield client
    await client.channel.close()


@pytest.fixture
async def client(leader: Rank) -> AsyncIterator[Client]:
    async for client in connected(leader):
        yield client


def start_message(**changes: Any) -> pb.StartRequestMessage:
    values: dict[str, Any] = {
        "request_id": ID,
        "client_id": "me",
        "model": "tiny",
        "prompt_token_ids": [1, 2, 3],
        "sampling": sampling_to_wire(SamplingParams(max_tokens=4, seed=9)),
        "epoch": EPOCH,
    }
    return pb.StartRequestMessage(**(values | changes))


async def refused(call: Any) -> tuple[str, str, dict[str, str]]:
    """(status, message, trailing metadata) of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 10)
    error = caught.value
    trailing = {key: value for key, value in (error.trailing_metadata() or ()) if isinstance(value, str)}
    return error.code().name, error.details() or "", trailing


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
        ({"sampling": None}, "INVALID_ARGUMENT", "sampling", "missing"),
        ({"sampling": pb.SamplingParamsMessage(top_p=1)}, "INVALID_ARGUMENT", "max_tokens", "max_tokens is 0"),
        (
            {"sampling": pb.SamplingParamsMessage(max_tokens=1, top_p=1, temperature=math.nan)},
            "INVALID_ARGUMENT",
            "temperature",
            "nan",
        ),
        ({"adapter": "lora"}, "INVALID_ARGUMENT", "adapter", "'lora'"),
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


async def test_a_message_that_is_no_protobuf_harms_nobody(leader: Rank, client: Client) -> None:
    await client.subscribe()
    raw = client.channel.unary_unary("/allspan.worker.v1.Worker/StartRequest")
    code, message, _ = await refused(raw(start_message().SerializeToString()[:-3]))
    assert (code, message) == ("INVALID_ARGUMENT", "the message is not the protobuf that this method takes")
    await client.stub.StartRequest(start_message())
    assert len(leader.core.submitted) == 1


async def test_what_the_core_refuses_has_its_status_and_code(leader: Rank, client: Client) -> None:
    await client.subscribe()
    leader.core.refusal = QueueFull("1024 requests wait")
    code, message, trailing = await refused(client.stub.StartRequest(start_message()))
    assert (code, message, trailing["allspan-code"]) == ("RESOURCE_EXHAUSTED", "1024 requests wait", "queue_full")
    leader.core.refusal = None
    await client.stub.StartRequest(start_message())


async def test_stop_request_cancels_and_checks_its_ids(leader: Rank, client: Client) -> None:
    await client.stub.StopRequest(pb.RequestIds(request_ids=[ID, OTHER_ID]))
    assert leader.core.cancelled == [ID, OTHER_ID]
    code, _, trailing = await refused(client.stub.StopRequest(pb.RequestIds(request_ids=[b"x"])))
    assert (code, trailing["allspan-field"]) == ("INVALID_ARGUMENT", "request_id")


async def test_status_tells_the_rank_its_engine_and_its_memory(client: Client) -> None:
    status = await client.stub.Status(pb.StatusRequest())
    assert (status.rank, status.world_size, status.epoch, status.state) == (0, 2, EPOCH, "running")
    assert (status.model, status.max_model_len, status.vocab_size) == ("tiny", 512, 1000)
    assert list(status.eos_token_ids) == [2, 3]
    assert (status.statistics.running, status.statistics.pages_used, status.statistics.kv_bytes) == (1, 4, 200)
    assert status.statistics.peak_rss_bytes > 2**20


async def test_status_is_answered_while_the_model_drains(leader: Rank, client: Client) -> None:
    draining = client.stub.Control(pb.ControlRequest(operation="stop_model", timeout_s=30))
    await client.stub.Status(pb.StatusRequest())
    assert leader.core.calls == []
    leader.core.release_stop.set()
    await asyncio.wait_for(draining, 10)
    assert leader.core.calls == ["stop_model"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.ControlRequest(operation="dance"), "'dance'"),
        (pb.ControlRequest(operation="stop_model", timeout_s=math.nan), "timeout_s is nan"),
    ],
)
async def test_an_operation_that_is_not_known_is_refused(
    client: Client, request_: pb.ControlRequest, words: str
) -> None:
    code, message, _ = await refused(client.stub.Control(request_))
    assert code == "INVALID_ARGUMENT"
    assert words in message


async def test_operations_reach_the_core_of_the_leader(leader: Rank, client: Client) -> None:
    await client.stub.Control(pb.ControlRequest(operation="start_model"))
    await client.stub.Control(pb.ControlRequest(operation="shutdown"))
    assert leader.core.calls == ["start_model", "shutdown"]
    leader.core.refusal = DeadlineExceeded("2 requests still run")
    code, message, _ = await refused(client.stub.Control(pb.ControlRequest(operation="stop_model", timeout_s=1)))
    assert (code, message) == ("DEADLINE_EXCEEDED", "2 requests still run")


async def test_each_operation_reaches_the_core_with_its_time(leader: Rank, client: Client) -> None:
    for operation in ("reset_prefix_cache", "unload_weights", "reload_weights", "start_profile", "stop_profile"):
        await client.stub.Control(pb.ControlRequest(operation=operation, timeout_s=7))
    await client.stub.Control(pb.ControlRequest(operation="start_profile"))
    assert leader.core.calls == [
        "reset_prefix_cache",
        "UNLOAD_WEIGHTS 7",
        "LOAD_WEIGHTS 7",
        "START_PROFILE 7",
        "STOP_PROFILE 7",
        "START_PROFILE 20",
    ]
    leader.core.refusal = CheckpointError("rank 1: /m/model.safetensors: truncated")
    request = pb.ControlRequest(operation="reload_weights", timeout_s=7)
    code, message, trailing = await refused(client.stub.Control(request))
    assert (code, trailing["allspan-code"]) == ("FAILED_PRECONDITION", "checkpoint")
    assert message == "rank 1: /m/model.safetensors: truncated"


async def test_what_is_inspected_comes_as_json_and_the_unknown_is_refused(client: Client) -> None:
    reply = await client.stub.Inspect(pb.InspectRequest(what="version"))
    assert json.loads(reply.json) == {"version": '1 (kernels "cpu")'}
    code, message, trailing = await refused(client.stub.Inspect(pb.InspectRequest(what="soul")))
    assert (code, message, trailing["allspan-field"]) == ("INVALID_ARGUMENT", "what is 'soul'", "what")


async def test_a_resumption_reaches_the_core_with_its_output(leader: Rank, client: Client) -> None:
    await client.subscribe()
    await client.stub.StartRequest(start_message(output_token_ids=[7, 999], priority=-3, timeout_s=5, cache_salt="x"))
    (request,) = leader.core.submitted
    assert (request.prompt_token_ids, request.output_token_ids, request.num_resumed) == ((1, 2, 3), [7, 999], 2)
    assert request.options == RequestOptions(priority=-3, timeout_s=5.0, cache_salt="x")


async def test_prompt_logprobs_and_all_timings_come_through(leader: Rank, client: Client) -> None:
    await client.subscribe()
    await client.stub.StartRequest(start_message())
    (request,) = leader.core.submitted
    timings = RequestTimings(0.1, 0.2, 0.3, 3, 2, 1, 1.75e9, 1, 4)
    leader.deliver(request, Output((), prompt_logprobs=(TokenLogprob(-1.0, ((7, -1.0),)),)))
    leader.deliver(request, Output((7,), (), "length", None, timings, (TokenLogprob(-2.0),)))
    outputs = [output_from_wire(message) for message in (await client.read()).outputs]
    whole = functools.reduce(Output.merged, outputs, Output())
    if not whole.finish_reason:  # the two came in two messages
        whole = whole.merged(output_from_wire((await client.read()).outputs[0]))
    assert whole.prompt_logprobs == (TokenLogprob(-1.0, ((7, -1.0),)), TokenLogprob(-2.0))
    assert whole.timings == timings


async def test_status_tells_every_counter_of_the_core(leader: Rank, client: Client) -> None:
    values = {field.name: i + 1 for i, field in enumerate(fields(CoreStatistics))} | {"weights_loaded": False}
    leader.core.counted = CoreStatistics(**values)  # type: ignore[arg-type]
    told = (await client.stub.Status(pb.StatusRequest())).statistics
    assert {name: getattr(told, name) for name in values} == values
    assert (told.weight_bytes, told.kv_bytes) == (0, 0), "given back"


async def test_a_follower_takes_payloads_and_no_operations(follower: Rank) -> None:
    async for client in connected(follower):
        await client.subscribe()
        await client.stub.StartRequest(start_message())
        await client.stub.StartRequest(start_message(request_id=OTHER_ID))
        await client.stub.StopRequest(pb.RequestIds(request_ids=[OTHER_ID]))
        assert follower.core.cancelled == [OTHER_ID]
        code, message, _ = await refused(client.stub.Control(pb.ControlRequest(operation="shutdown")))
        assert code == "INVALID_ARGUMENT"
        assert "rank 0" in message
        client.stream.cancel()
        await asyncio.to_thread(wait_until, lambda: ID in follower.core.cancelled, 10, "the payload's end")
        assert follower.core.cancelled == [OTHER_ID, ID]


async def test_stopping_delivers_what_is_left_then_ends_the_streams(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    async for client in connected(rank):
        await client.subscribe()
        await client.stub.StartRequest(start_message())
        rank.deliver(rank.core.submitted[0], Unavailable("the engine is shutting down"))
        await asyncio.to_thread(rank.server.stop)
        (output,) = (await client.read()).outputs
        assert (output.error_code, output.error_message) == ("unavailable", "the engine is shutting down")
        assert await asyncio.wait_for(client.stream.read(), 10) is grpc.aio.EOF


def test_the_socket_is_its_owners_alone(leader: Rank) -> None:
    path = Path(leader.address.removeprefix("unix:"))
    assert path.name == "r0.e5.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80)
    with pytest.raises(ConfigError, match="at most 100"):
        listen_target(worker_config(deep), 0)


def test_an_address_that_others_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a loopback address"):
        listen_target(worker_config(tmp_path, "0.0.0.0"), 0)
    assert listen_target(worker_config(tmp_path, "::1"), 0) == "[::1]:0"


async def test_a_loopback_port_is_published(tmp_path: Path) -> None:
    config = worker_config(tmp_path, "127.0.0.1")
    facts = RankFacts(0, 1, "here", 512, 1000, (), "reference", 0.0, 0, 0)
    server = RankServer(FakeCore(), facts, config, lambda error: None, inspect)
    try:
        async with grpc.aio.insecure_channel(server.start()) as channel:
            assert (await WorkerStub(channel).Status(pb.StatusRequest())).world_size == 1
    finally:
        server.stop()


def test_a_place_that_cannot_be_listened_on_is_named(tmp_path: Path) -> None:
    facts = RankFacts(0, 1, "here", 512, 1000, (), "reference", 0.0, 0, 0)
    server = RankServer(FakeCore(), facts, worker_config(tmp_path / "missing"), lambda error: None, inspect)
    with pytest.raises(ConfigError, match="cannot listen on unix:"):
        server.start()
