"""A rank's service over a real unix socket with a scripted core behind it, and the means to talk to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.expert_load import ExpertLoad
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.config.settings import ModelConfig, ServiceConfig, WorkerConfig
from allspan.protos.convert import CHANNEL_OPTIONS, sampling_to_wire
from allspan.protos.worker_pb2_grpc import WorkerStub
from allspan.worker.scheduler.request import Request
from allspan.worker.service.server import RankServer
from allspan.worker.service.servicer import RankFacts
from support.fake_core import FakeCore

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
        self.counting = threading.Event()
        self.counting.set()
        facts = RankFacts(
            0 if is_leader else 1, 2, "here", 512, 1000, (2, 3), "reference", "", "0", 2, 1.5, 100, 200, ()
        )
        self.server = RankServer(
            self.core, facts, worker_config(run_dir), self.failures.append, inspect, experts=self.experts
        )
        self.address = self.server.start()

    def experts(self) -> tuple[ExpertLoad, ...]:
        self.counting.wait(10)
        return (ExpertLoad(2, (5, 6), (11.0,)),)

    def deliver(self, request: Request, *results: Any) -> None:
        self.server.deliver([(request, result) for result in results])


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
