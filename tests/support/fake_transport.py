"""Scripted ranks for the facade's tests: no sockets, everything on the test's own asyncio loop.

ranks = FakeRanks(2)
session = Session([source], ranks.connect)
ranks[1].replies["StartRequest"] = QueueFull("…")      # raised; or a number of seconds to take; or a coroutine function
ranks[0].send(outputs)                                   # on the Results stream
ranks[1].break_stream("Socket closed")
assert ranks.calls == [("StartRequest", 1), ("StartRequest", 0)]
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from allspan.protos import worker_pb2 as pb
from allspan.protos.cluster import ClusterInfo, RankInfo
from allspan.protos.errors import AllspanError, ConfigError, DeadlineExceeded, Unavailable
from allspan.protos.results import Output
from allspan.protos.wire import output_to_wire

Reply = AllspanError | float | Callable[[Any], Awaitable[None]]


class FakeRanks:
    """The ranks of one or more worlds, by their addresses. `calls`: (method, rank) in order, Status left out."""

    def __init__(self, size: int = 2, epoch: int = 1) -> None:
        self.epoch = epoch
        self.calls: list[tuple[str, int]] = []
        self._ranks = [FakeTransport(self, rank, size) for rank in range(size)]

    def __getitem__(self, rank: int) -> FakeTransport:
        return self._ranks[rank]

    def __len__(self) -> int:
        return len(self._ranks)

    def connect(self, address: str) -> FakeTransport:
        return self._ranks[int(address.partition(":")[2])]

    def info(self, state: str = "ready", cause: str = "", **changes: Any) -> ClusterInfo:
        ranks = tuple(RankInfo(r, 100 + r, "testhost", f"rank:{r}") for r in range(len(self)))
        known = ClusterInfo(self.epoch, state, "tiny", "", 128, 1000, (), cause, ranks=ranks)
        return replace(known, **changes)

    def revive(self) -> None:
        """A new epoch: whole streams, every call answered."""
        self.epoch += 1
        for rank in self._ranks:
            rank.reset()


class FakeTransport:
    """One rank. `requests`: the messages of its calls, by method; `replies`: what a method does instead of Ack.

    A rank that nobody breaks sends a heartbeat as often as it is asked to, unless it is `silent`.
    """

    def __init__(self, ranks: FakeRanks, rank: int, size: int) -> None:
        self._ranks = ranks
        self._rank = rank
        self._size = size
        self.reset()

    def reset(self) -> None:
        self.replies: dict[str, Reply] = {}
        self.requests: dict[str, list[Any]] = {}
        self.is_subscribed = False
        self.silent = False
        self._stream: asyncio.Queue[pb.StepOutputs | AllspanError | None] = asyncio.Queue()

    async def unary(self, method: Any, request: Any, timeout: float) -> Any:
        if method.name != "Status":
            self._ranks.calls.append((method.name, self._rank))
        self.requests.setdefault(method.name, []).append(request)
        reply = self.replies.get(method.name)
        if isinstance(reply, AllspanError):
            raise reply
        if isinstance(reply, (int, float)):
            await asyncio.sleep(min(reply, timeout))
            if reply > timeout:
                raise DeadlineExceeded("Deadline Exceeded")
        elif reply is not None:
            await reply(request)
        if method.name == "Status":
            return pb.WorkerStatus(rank=self._rank, world_size=self._size, epoch=self._ranks.epoch, model="tiny")
        return pb.Ack()

    async def stream(self, method: Any, request: Any) -> AsyncIterator[Any]:
        self.is_subscribed = True
        self.requests.setdefault(method.name, []).append(request)
        try:
            heartbeat = pb.StepOutputs(epoch=self._ranks.epoch)
            yield heartbeat
            while (item := await self._next(request.heartbeat_ms / 1000, heartbeat)) is not None:
                if isinstance(item, AllspanError):
                    raise item
                yield item
        finally:
            self.is_subscribed = False

    async def _next(self, seconds: float, heartbeat: pb.StepOutputs) -> pb.StepOutputs | AllspanError | None:
        while True:
            try:
                item = await asyncio.wait_for(self._stream.get(), seconds)
            except TimeoutError:
                item = heartbeat
            if not self.silent or not isinstance(item, pb.StepOutputs):
                return item

    async def close(self) -> None:
        self.replies = dict.fromkeys(("StartRequest", "StopRequest", "Status", "Control"), Unavailable("closed"))

    def send(self, *outputs: tuple[bytes, Output]) -> None:
        """One step's message."""
        messages = [output_to_wire(request_id, output) for request_id, output in outputs]
        self._stream.put_nowait(pb.StepOutputs(epoch=self._ranks.epoch, outputs=messages))

    def break_stream(self, why: str = "Socket closed") -> None:
        """The rank is gone: its stream breaks and it answers nothing."""
        self._stream.put_nowait(Unavailable(why))
        self.replies = dict.fromkeys(("StartRequest", "StopRequest", "Status", "Control"), Unavailable(why))

    def end_stream(self) -> None:
        self._stream.put_nowait(None)


class FakeSource:
    """What cluster.json says; None: nothing can be read."""

    def __init__(self, info: ClusterInfo | None) -> None:
        self.info = info

    async def read(self) -> ClusterInfo:
        if self.info is None:
            raise ConfigError("no cluster to attach to")
        return self.info
