"""Publishes KV events: a PUB socket a replica, and a ROUTER socket that answers with what was sent before."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from allspan.client.gateway.config import KvEventsConfig
from allspan.client.gateway.kv_events.batches import KvEvents
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.tls import is_loopback

logger = logging.getLogger("allspan.gateway")

END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


class KvPublisher:
    """The sockets of one replica. ConfigError for an address that cannot be bound, or without pyzmq and msgspec."""

    def __init__(self, config: KvEventsConfig, replica: int) -> None:
        try:
            import msgspec
            import zmq
            import zmq.asyncio
        except ImportError as error:
            way = "pip install 'allspan[zmq]'"
            raise ConfigError(f"--kv-events-endpoint needs pyzmq and msgspec ({error}): {way}") from None
        self._encode = msgspec.msgpack.encode
        self._events = KvEvents(config.kv_events_format)
        self._topic = config.kv_events_topic.encode()
        self._replica = replica
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.kv_events_buffer_steps)
        self._next = 0
        self._context: Any = zmq.asyncio.Context()
        self._pub: Any = self._context.socket(zmq.PUB)
        self._replay: Any = None
        flag = "--kv-events-endpoint"
        try:
            self._pub.bind(of_replica(config.kv_events_endpoint, replica))
            if config.kv_events_replay_endpoint:
                flag, self._replay = "--kv-events-replay-endpoint", self._context.socket(zmq.ROUTER)
                self._replay.bind(of_replica(config.kv_events_replay_endpoint, replica))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{flag} of replica {replica} cannot be bound: {error}") from None

    async def publish(self, source: AsyncGenerator[pb.PageEvents, None]) -> None:
        """Sends what the source tells until it ends."""
        async with contextlib.aclosing(source) as news:
            async for told in news:
                if events := self._events.of(told):
                    payload = self._encode(self._events.batch(time.time(), events, self._replica))
                    sequence, self._next = self._next, self._next + 1
                    self._sent.append((sequence, payload))
                    await self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    async def answer(self) -> None:
        """Answers requests for what was sent from a sequence number on, until it is cancelled."""
        while self._replay is not None:
            client, *_, start = await self._replay.recv_multipart()
            for sequence, payload in list(self._sent):
                if sequence >= int.from_bytes(start[:8], "big"):
                    await self._replay.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
            await self._replay.send_multipart((client, b"", END, b""))

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.asynccontextmanager
async def published(
    config: KvEventsConfig, sources: Sequence[AsyncGenerator[pb.PageEvents, None]]
) -> AsyncIterator[None]:
    """Publishes the events of each replica inside the block, where an endpoint is given. ConfigError."""
    if not config.kv_events_endpoint:
        yield
        return
    async with contextlib.AsyncExitStack() as stack:
        publishers = [
            stack.enter_context(contextlib.closing(KvPublisher(config, replica))) for replica in range(len(sources))
        ]
        tasks = []
        for publisher, source in zip(publishers, sources, strict=True):
            tasks += [asyncio.create_task(publisher.publish(source)), asyncio.create_task(publisher.answer())]
        for task in tasks:
            task.add_done_callback(_report)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("KV events are published no more: %r", error, exc_info=error)


def check_endpoints(config: KvEventsConfig, is_insecure: bool) -> None:
    """Raises ConfigError for an address that others on the network reach, unless that is allowed."""
    endpoints = {
        "--kv-events-endpoint": config.kv_events_endpoint,
        "--kv-events-replay-endpoint": config.kv_events_replay_endpoint,
    }
    for flag, endpoint in endpoints.items():
        kind, _, where = endpoint.partition("://")
        if not endpoint or kind in ("ipc", "inproc"):
            continue
        host, _, port = where.rpartition(":")
        if kind != "tcp" or not port.isdigit():
            raise ConfigError(f"{flag} is {endpoint!r}, must be like tcp://127.0.0.1:5557 or ipc:///run/kv")
        if not is_insecure and not is_loopback(host.strip("[]")):
            raise ConfigError(
                f"{flag} is {endpoint!r}, must be on a loopback address, because ZeroMQ is in the clear here and "
                "others on the network could read the tokens of prompts; give --insecure"
            )


def of_replica(endpoint: str, replica: int) -> str:
    """Returns the endpoint of a replica: a port higher by its number, or a name with it."""
    head, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp:") and port.isdigit():
        return f"{head}:{int(port) + replica}"
    return f"{endpoint}_dp{replica}" if replica else endpoint
