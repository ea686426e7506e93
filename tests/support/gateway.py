"""The real gateway (uvicorn and gRPC on free ports) over a scripted engine, on the test's loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import grpc
import httpx

from allspan.client.gateway.app import bind, serve_gateway
from allspan.client.gateway.config import GROUPS, GatewayConfig
from allspan.client.gateway.context import GatewayContext
from allspan.protos import inference_pb2_grpc
from allspan.protos.text import Tokenizer
from support.chat_tokenizer import EOS, VOCAB_SIZE, chat_tokenizer
from support.fake_engine import ANSWER, FakeEngine


@dataclass
class Gateway:
    """A running one."""

    engine: FakeEngine
    http: httpx.AsyncClient
    http_address: str
    grpc_address: str
    worker_address: str
    """Empty without `worker_port`."""
    stop: asyncio.Event
    reload: asyncio.Event
    task: asyncio.Task[None]

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)


def fake_engine(**script: Any) -> FakeEngine:
    values: dict[str, Any] = {"tokens": tuple(ANSWER.encode()), "eos": EOS, "vocab_size": VOCAB_SIZE}
    return FakeEngine(**(values | script))


@dataclass
class Started:
    addresses: list[str] = field(default_factory=list)
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, http: str, grpc: str) -> None:
        self.addresses += [http, grpc]
        self.event.set()


def gateway_config(**settings: Any) -> GatewayConfig:
    """Free ports, neutral sampling; `settings` by their flags' names, whatever group they are in."""
    settings = {"generation_config": "neutral"} | settings
    groups = {}
    for name, (_, group) in GROUPS.items():
        own = {field.name for field in fields(group)} & settings.keys()
        groups[name] = group(**{key: settings.pop(key) for key in own})
    return GatewayConfig(**({"port": 0, "grpc_port": 0} | groups | settings))


def front(engine: FakeEngine | None = None, **settings: Any) -> GatewayContext:
    """What routes are made of, without a server."""
    return GatewayContext.of(engine or fake_engine(), chat_tokenizer(), gateway_config(**settings))  # type: ignore[arg-type]


@asynccontextmanager
async def gateway(
    engine: FakeEngine | None = None, tokenizer: Tokenizer | None = None, **settings: Any
) -> AsyncIterator[Gateway]:
    """Serves until the block ends, then asserts that it stopped by itself and left nothing running on the engine."""
    engine = engine or fake_engine()
    config = gateway_config(**({"shutdown_timeout": 2.0} | settings))
    stop, reload, started = asyncio.Event(), asyncio.Event(), Started()
    tokenizer = tokenizer or chat_tokenizer()
    sockets = bind(config)
    worker_address = sockets.worker_address
    task = asyncio.create_task(serve_gateway(engine, tokenizer, config, sockets, stop, started, reload=reload))  # type: ignore[arg-type]
    waiting = asyncio.create_task(started.event.wait())
    await asyncio.wait((task, waiting), timeout=10, return_when=asyncio.FIRST_COMPLETED)
    if not started.event.is_set():
        await asyncio.wait_for(task, 1)
    http_address, grpc_address = started.addresses
    try:
        async with httpx.AsyncClient(base_url=http_address, timeout=10, trust_env=False) as http:
            yield Gateway(engine, http, http_address, grpc_address, worker_address, stop, reload, task)
    finally:
        stop.set()
        done, _ = await asyncio.wait((task,), timeout=10)
        assert done, "the gateway did not stop"
    assert task.cancelled() or task.result() is None
    await eventually(lambda: not engine.tasks)


def events(text: str) -> list[Any]:
    """The payloads of a stream of server-sent events, "[DONE]" as it is."""
    blocks = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    return [block if block == "[DONE]" else json.loads(block) for block in blocks]


def stub(channel: grpc.aio.Channel) -> Any:
    """The generated client of the public service."""
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


async def eventually(condition: Callable[[], object], timeout: float = 5.0) -> None:
    """Returns as soon as the condition holds; fails after `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"it did not come within {timeout:g} s") from None
