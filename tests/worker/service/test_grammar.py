"""A rank takes a request with a grammar once it has compiled that, and answers everybody else meanwhile."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.convert import sampling_to_wire
from allspan.worker.service import servicer
from support.served_rank import ID, OTHER_ID, Client, Rank, start_message


class SlowGrammars:
    """Compiled when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Grammar] = []
        self.future: Future[Any] = Future()

    def begin(self, grammar: Grammar) -> Future[Any]:
        self.asked.append(grammar)
        return self.future


def with_grammar(**changes: Any) -> pb.StartRequestMessage:
    params = SamplingParams(seed=9, grammar=Grammar("regex", "a+"))
    return start_message(sampling=sampling_to_wire(params), **changes)


@pytest.fixture
def grammars(leader: Rank) -> SlowGrammars:
    leader.core.grammars = SlowGrammars()
    return leader.core.grammars


async def test_it_is_taken_in_when_its_grammar_is_there(leader: Rank, client: Client, grammars: SlowGrammars) -> None:
    await client.subscribe()
    call = asyncio.ensure_future(client.stub.StartRequest(with_grammar()))
    await client.stub.StartRequest(start_message(request_id=OTHER_ID))
    assert [request.request_id for request in leader.core.submitted] == [OTHER_ID]
    compiled = object()
    grammars.future.set_result(compiled)
    await asyncio.wait_for(call, 10)
    assert grammars.asked == [Grammar("regex", "a+")]
    assert leader.core.submitted[-1].request_id == ID
    assert leader.core.submitted[-1].grammar is compiled


async def test_a_refused_grammar_refuses_the_request(leader: Rank, client: Client, grammars: SlowGrammars) -> None:
    await client.subscribe()
    grammars.future.set_exception(InvalidRequest("grammar is no regex: a", "grammar"))
    with pytest.raises(grpc.aio.AioRpcError, match="grammar is no regex: a") as caught:
        await client.stub.StartRequest(with_grammar())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not leader.core.submitted


async def test_one_that_takes_too_long_is_refused(
    leader: Rank, client: Client, grammars: SlowGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "COMPILE_S", 0.05)
    await client.subscribe()
    with pytest.raises(grpc.aio.AioRpcError, match="not compiled within"):
        await client.stub.StartRequest(with_grammar())
    assert not grammars.future.cancelled()
    grammars.future.set_result(object())
    await client.stub.Status(pb.StatusRequest())
    assert not leader.core.submitted


async def test_a_client_that_leaves_meanwhile_leaves_no_request(
    leader: Rank, client: Client, grammars: SlowGrammars
) -> None:
    await client.subscribe()
    call = asyncio.ensure_future(client.stub.StartRequest(with_grammar()))
    while not grammars.asked:
        await asyncio.sleep(0.01)
    client.stream.cancel()
    other = Client(leader)
    for _ in range(200):  # until the service has seen it
        try:
            await other.subscribe()
            break
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.02)
    other.stream.cancel()
    await other.channel.close()
    await asyncio.sleep(0.1)
    grammars.future.set_result(object())
    with pytest.raises(grpc.aio.AioRpcError, match="no open Results stream"):
        await asyncio.wait_for(call, 10)
    assert not leader.core.submitted
