"""Scripted ranks for the facade's tests: no sockets, everything on the test's own asyncio loop.

ranks = FakeRanks(2)
session = Session([source], ranks.connect)
ranks[1].replies["StartRequest"] = QueueFull("…")      # raised; or a number of seconds to take; or a coroutine function
ranks[0].send(outputs)                                   # on the Results stream
ranks[1].break_stream("Socket closed")
ranks.step()                                             # the leader makes a token for each request that it has
assert ranks.calls == [("StartRequest", 1), ("StartRequest", 0)]
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import AllspanError, ConfigError, DeadlineExceeded, Unavailable
from allspan.protos.api.results import Output, RequestTimings
from allspan.protos.cluster.cluster_file import ClusterInfo, RankInfo
from allspan.protos.cluster.tls import NO_TLS, TlsFiles
from allspan.protos.convert import adapter_from_wire, adapters_to_wire, output_to_wire, sampling_from_wire

SQL = AdapterModule("sql", "/sql", digest=8)

Reply = AllspanError | float | Callable[[Any], Awaitable[None]]


def counted(prompt_ids: Sequence[int], position: int) -> int:
    """Output token `position` (from 0) of the fake leader."""
    return (prompt_ids[-1] + 1 + position) % 1000


class FakeRanks:
    """The ranks of one or more worlds, by their addresses. `calls`: (method, rank) in order, Status left out."""

    def __init__(self, size: int = 2, epoch: int = 1, name: str = "rank") -> None:
        """`name` is the first part of their addresses."""
        self.epoch = epoch
        self.name = name
        self.calls: list[tuple[str, int]] = []
        self.adapters = [SQL]
        """Those of the present epoch; each begins with SQL."""
        self.version = 0
        self._ranks = [FakeRank(rank) for rank in range(size)]
        self._made: dict[tuple[int, bytes], list[int]] = {}

    def __getitem__(self, rank: int) -> FakeRank:
        return self._ranks[rank]

    def __len__(self) -> int:
        return len(self._ranks)

    def connect(self, address: str, tls: TlsFiles = NO_TLS) -> FakeTransport:
        return FakeTransport(self, self._ranks[int(address.partition(":")[2])])

    def info(self, state: str = "ready", cause: str = "", **changes: Any) -> ClusterInfo:
        ranks = tuple(RankInfo(r, 100 + r, "testhost", f"{self.name}:{r}") for r in range(len(self)))
        known = ClusterInfo(self.epoch, state, "tiny", "", 128, 1000, (), cause, ranks=ranks)
        return replace(known, **changes)

    def told(self) -> pb.AdapterList:
        """What the leader tells of its adapters."""
        return adapters_to_wire(self.version, self.adapters)

    def change_adapters(self, request: Any) -> pb.AdapterReply:
        """What the leader answers to LoadAdapter and UnloadAdapter."""
        if isinstance(request, pb.LoadAdapterRequest):
            module = adapter_from_wire(request.adapter)
            self.adapters += [module] if module not in self.adapters else []
        else:
            self.adapters = [each for each in self.adapters if each.name != request.name]
        self.version += 1
        return pb.AdapterReply(adapters=self.told(), num_requests=len(self[0].requests.get("StartRequest", ())))

    def step(self, *request_ids: bytes) -> None:
        """One token for each request that the leader has (or for these): the numbers after the prompt's last one, as
        `counted`, whatever part of them an earlier attempt has made."""
        outputs = []
        for message in self[0].requests.get("StartRequest", ()):
            made = self._made.setdefault((self.epoch, message.request_id), list(message.output_token_ids))
            most = sampling_from_wire(message.sampling).max_tokens
            if len(made) < most and (not request_ids or message.request_id in request_ids):
                made.append(counted(message.prompt_token_ids, len(made)))
                reason = "length" if len(made) == most else ""
                timings = RequestTimings(0.1, 0.2, 0.5, len(message.prompt_token_ids), 1, len(made))
                outputs.append((message.request_id, Output((made[-1],), (), reason, None, timings)))
        self[0].send(*outputs)

    def revive(self) -> None:
        """A new epoch: whole streams, every call answered. What is left of the old one breaks."""
        self.epoch += 1
        self.adapters, self.version = [SQL], 0
        for rank in self._ranks:
            rank.reset()


class FakeRank:
    """One rank. `requests`: the messages of its calls, by method; `replies`: what a method does instead of Ack.

    A rank that nobody breaks sends a heartbeat as often as it is asked to, unless it is `silent`.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stream: asyncio.Queue[pb.StepOutputs | AllspanError | None] = asyncio.Queue()
        self.reset()

    def reset(self) -> None:
        self.stream.put_nowait(Unavailable("Socket closed"))
        self.stream = asyncio.Queue()
        self.replies: dict[str, Reply] = {}
        self.requests: dict[str, list[Any]] = {}
        self.is_subscribed = False
        self.silent = False

    def send(self, *outputs: tuple[bytes, Output]) -> None:
        """One step's message."""
        messages = [output_to_wire(request_id, output) for request_id, output in outputs]
        self.stream.put_nowait(pb.StepOutputs(outputs=messages))

    def refuse(self, why: str) -> None:
        """From now on the leader lets no request in, for this reason; "": it does again."""
        self.stream.put_nowait(pb.StepOutputs(refusal=why))

    def fail(self, request_id: bytes, error: AllspanError) -> None:
        """One request's failure."""
        message = pb.RequestOutput(
            request_id=request_id, finish_reason="error", error_code=error.code, error_message=error.message
        )
        self.stream.put_nowait(pb.StepOutputs(outputs=[message]))

    def break_stream(self, why: str = "Socket closed") -> None:
        """The rank is gone: its stream breaks and it answers nothing."""
        self.stream.put_nowait(Unavailable(why))
        self.replies = dict.fromkeys(("StartRequest", "StopRequest", "Status", "Control"), Unavailable(why))

    def end_stream(self) -> None:
        self.stream.put_nowait(None)


class FakeTransport:
    """A connection to a rank of one epoch."""

    def __init__(self, ranks: FakeRanks, rank: FakeRank) -> None:
        self._ranks = ranks
        self._rank = rank
        self._epoch = ranks.epoch
        self._stream = rank.stream
        self._closed = False

    async def unary(self, method: Any, request: Any, timeout: float) -> Any:
        rank = self._rank
        if self._closed or self._epoch != self._ranks.epoch:
            raise Unavailable("closed" if self._closed else "Connection refused")
        if method.name != "Status":
            self._ranks.calls.append((method.name, rank.rank))
        rank.requests.setdefault(method.name, []).append(request)
        reply = rank.replies.get(method.name)
        if isinstance(reply, AllspanError):
            raise reply
        if isinstance(reply, (int, float)):
            await asyncio.sleep(min(reply, timeout))
            if reply > timeout:
                raise DeadlineExceeded("Deadline Exceeded")
        elif reply is not None:
            await reply(request)
        if method.name == "Status":
            size = len(self._ranks)
            return pb.WorkerStatus(
                rank=rank.rank, world_size=size, epoch=self._epoch, pid=100 + rank.rank, model="tiny"
            )
        if method.name in ("LoadAdapter", "UnloadAdapter"):
            return self._ranks.change_adapters(request)
        return pb.Ack()

    async def stream(self, method: Any, request: Any) -> AsyncIterator[Any]:
        rank, stream = self._rank, self._stream
        rank.is_subscribed = True
        rank.requests.setdefault(method.name, []).append(request)
        try:
            yield pb.StepOutputs(adapters=None if rank.rank else self._ranks.told())
            while (item := await self._next(request.heartbeat_ms / 1000)) is not None:
                if isinstance(item, AllspanError):
                    raise item
                yield item
        finally:
            if stream is rank.stream:
                rank.is_subscribed = False

    async def _next(self, seconds: float) -> pb.StepOutputs | AllspanError | None:
        while True:
            item: pb.StepOutputs | AllspanError | None = pb.StepOutputs()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    item = await self._stream.get()
            if not self._rank.silent or not isinstance(item, pb.StepOutputs):
                return item

    async def close(self) -> None:
        self._closed = True


class FakeSource:
    """What cluster.json says; None: nothing can be read."""

    def __init__(self, info: ClusterInfo | None) -> None:
        self.info = info

    async def read(self) -> ClusterInfo:
        if self.info is None:
            raise ConfigError("no cluster to attach to")
        return self.info
