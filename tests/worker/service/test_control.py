"""What a rank is asked beside requests: its state, operations, inspection; and payloads with more than a prompt."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from dataclasses import fields
from typing import Any

import pytest

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.counters import EngineCounters
from allspan.protos.api.errors import CheckpointError, DeadlineExceeded
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output, RequestTimings, TokenLogprob
from allspan.protos.convert import counters_from_wire, output_from_wire
from support.served_rank import EPOCH, ID, OTHER_ID, Client, Rank, connected, refused, start_message
from support.waiting import wait_until


async def test_status_tells_the_rank_its_engine_and_its_memory(client: Client) -> None:
    status = await client.stub.Status(pb.StatusRequest())
    assert (status.rank, status.world_size, status.epoch, status.state) == (0, 2, EPOCH, "running")
    assert (status.model, status.max_model_len, status.vocab_size) == ("tiny", 512, 1000)
    assert list(status.eos_token_ids) == [2, 3]
    counters = counters_from_wire(status.statistics.counters)
    assert (counters.running, counters.pages_used, status.statistics.kv_bytes) == (1, 4, 200)
    assert status.statistics.peak_rss_bytes > 2**20


async def test_status_tells_the_tokens_of_experts_and_does_not_wait_for_a_device_that_hangs(
    leader: Rank, client: Client
) -> None:
    for _ in range(2):
        (load,) = (await client.stub.Status(pb.StatusRequest())).experts
        assert (load.layer, list(load.tokens), list(load.groups)) == (2, [5, 6], [11.0])
        leader.counting.clear()
    leader.counting.set()


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
    leader.core.rejection = DeadlineExceeded("2 requests still run")
    code, message, _ = await refused(client.stub.Control(pb.ControlRequest(operation="stop_model", timeout_s=1)))
    assert (code, message) == ("DEADLINE_EXCEEDED", "2 requests still run")


async def test_each_operation_reaches_the_core_with_its_time(leader: Rank, client: Client) -> None:
    for operation in ("reset_prefix_cache", "unload_weights", "reload_weights", "start_profile", "stop_profile"):
        await client.stub.Control(pb.ControlRequest(operation=operation, timeout_s=7))
    await client.stub.Control(pb.ControlRequest(operation="start_profile"))
    await client.stub.Control(pb.ControlRequest(operation="rebalance_experts", timeout_s=7))
    assert leader.core.calls == [
        "reset_prefix_cache",
        "UNLOAD_WEIGHTS 7",
        "RELOAD_WEIGHTS 7",
        "START_PROFILE 7",
        "STOP_PROFILE 7",
        "START_PROFILE 20",
        "rebalance_experts 7",
    ]
    leader.core.rejection = CheckpointError("rank 1: /m/model.safetensors: truncated")
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
    values: dict[str, Any] = {field.name: i + 1 for i, field in enumerate(fields(EngineCounters))}
    values |= {"weights_loaded": False, "step_tokens": (3, 4)}
    leader.core.counted = EngineCounters(**values)
    told = (await client.stub.Status(pb.StatusRequest())).statistics
    assert counters_from_wire(told.counters) == leader.core.counted
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
