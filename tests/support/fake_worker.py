"""A cluster of fake ranks: real worker services on unix sockets, and a cluster.json, without a model.

The tokens are a function of the prompt (see `count_up`), so that tests know them. Everything runs in one thread of this
process; switches make ranks refuse, fall silent, die, and come back as a new epoch.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from allspan.protos import worker_pb2 as pb
from allspan.protos import worker_pb2_grpc
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.counters import EngineCounters
from allspan.protos.api.errors import ERRORS, AllspanError, InvalidRequest
from allspan.protos.api.results import Output, RequestTimings, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.cluster_file import ClusterInfo, RankInfo, socket_path, write_cluster
from allspan.protos.convert import (
    CHANNEL_OPTIONS,
    adapter_to_wire,
    adapters_to_wire,
    counters_to_wire,
    output_to_wire,
    sampling_from_wire,
)

VOCAB_SIZE = 1000
HOST = "testhost"

T = TypeVar("T")
Tokens = Callable[[Sequence[int], int], int]


def count_up(prompt_ids: Sequence[int], position: int) -> int:
    """Output token `position` (from 0): the numbers after the prompt's last one."""
    return (prompt_ids[-1] + 1 + position) % VOCAB_SIZE


def rank_pid(rank: int) -> int:
    return 70000 + rank


@dataclass
class _Request:
    message: pb.StartRequestMessage
    sampling: SamplingParams
    made: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)


class FakeRank(worker_pb2_grpc.WorkerServicer):
    """`refusal`: what StartRequest answers with; `silent`: streams send nothing; `mute`: no call is answered."""

    def __init__(self, cluster: FakeCluster, rank: int, epoch: int) -> None:
        self.rank = rank
        self.refusal: AllspanError | None = None
        self.silent = False
        self.mute = False
        self.requests: dict[bytes, _Request] = {}
        self._cluster = cluster
        self._epoch = epoch
        self._streams: dict[str, asyncio.Queue[pb.StepOutputs]] = {}
        self._progress = 0
        self._finished = 0
        self._generated = 0

    async def StartRequest(self, request: pb.StartRequestMessage, context: grpc.aio.ServicerContext) -> pb.Ack:
        await self._unless_mute()
        self._cluster.events.append(("start", self.rank, request.request_id.hex()))
        if self.refusal is not None:
            trailing = [("allspan-code", self.refusal.code)]
            if isinstance(self.refusal, InvalidRequest) and self.refusal.field:
                trailing.append(("allspan-field", self.refusal.field))
            status = grpc.StatusCode[ERRORS[self.refusal.code].grpc]
            await context.abort(status, self.refusal.message, tuple(trailing))
        if request.epoch != self._epoch:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"this is epoch {self._epoch}, not {request.epoch}")
        if request.request_id in self.requests:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"request {request.request_id.hex()} exists")
        if request.client_id not in self._streams:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"client {request.client_id} has no Results stream"
            )
        self.requests[request.request_id] = _Request(
            request, sampling_from_wire(request.sampling), list(request.output_token_ids)
        )
        return pb.Ack()

    async def StopRequest(self, request: pb.RequestIds, context: grpc.aio.ServicerContext) -> pb.Ack:
        await self._unless_mute()
        for request_id in request.request_ids:
            self._cluster.events.append(("stop", self.rank, request_id.hex()))
            stopped = self.requests.pop(request_id, None)
            if stopped is not None and self.rank == 0:
                self._send(stopped, Output(finish_reason="cancelled", timings=_timings(stopped)))
        return pb.Ack()

    async def Results(
        self, request: pb.ResultsSubscription, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepOutputs]:
        await self._unless_mute()
        stream = self._streams[request.client_id] = asyncio.Queue()
        self._cluster.events.append(("subscribe", self.rank, request.client_id))
        try:
            told = adapters_to_wire(0, self._cluster.adapters)
            yield pb.StepOutputs(epoch=self._epoch, progress=self._progress, adapters=told)
            while True:
                try:
                    message = await asyncio.wait_for(stream.get(), request.heartbeat_ms / 1000)
                except TimeoutError:
                    message = pb.StepOutputs(epoch=self._epoch, progress=self._progress)
                if not self.silent:
                    yield message
        finally:
            del self._streams[request.client_id]
            self._cluster.events.append(("unsubscribe", self.rank, request.client_id))
            for request_id, open_request in list(self.requests.items()):
                if open_request.message.client_id == request.client_id:
                    del self.requests[request_id]

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.WorkerStatus:
        await self._unless_mute()
        return pb.WorkerStatus(
            rank=self.rank,
            world_size=self._cluster.size,
            epoch=self._epoch,
            pid=rank_pid(self.rank),
            host=HOST,
            state="running",
            progress=self._progress,
            model=self._cluster.model,
            model_path=self._cluster.model_path,
            max_model_len=self._cluster.max_model_len,
            vocab_size=VOCAB_SIZE,
            kernels="fake",
            adapters=map(adapter_to_wire, self._cluster.adapters),
            statistics=pb.Statistics(
                counters=counters_to_wire(
                    EngineCounters(
                        running=len(self.requests),
                        steps=self._progress,
                        generated_tokens=self._generated,
                        finished_requests=self._finished,
                        host_s=0.001 * self._progress,
                    )
                ),
                peak_rss_bytes=1000 * (self.rank + 1),
                load_s=0.5 + self.rank,
            ),
        )

    async def Control(self, request: pb.ControlRequest, context: grpc.aio.ServicerContext) -> pb.Ack:
        await self._unless_mute()
        self._cluster.events.append((request.operation, self.rank, ""))
        return pb.Ack()

    def step(self) -> None:
        """The leader's: one token for every request; ended ones leave all ranks, as their plan would make them."""
        self._progress += 1
        for request_id, request in list(self.requests.items()):
            output = self._next(request)
            self._send(request, output)
            if output.finish_reason:
                self._finished += 1
                for rank in self._cluster.ranks:
                    rank.requests.pop(request_id, None)

    def _next(self, request: _Request) -> Output:
        sampling = request.sampling
        token_id = self._cluster.tokens(request.message.prompt_token_ids, len(request.made))
        request.made.append(token_id)
        self._generated += 1
        ends = token_id in sampling.stop_token_ids
        reason = "stop" if ends else "length" if len(request.made) == sampling.max_tokens else ""
        top = tuple((token_id, -0.5) for _ in range(sampling.logprobs or 0))
        return Output(
            token_ids=(token_id,),
            logprobs=(TokenLogprob(-0.5, top),) if sampling.logprobs is not None else (),
            finish_reason=reason,
            stop_token_id=token_id if ends else None,
            timings=_timings(request) if reason else None,
        )

    def _send(self, request: _Request, output: Output) -> None:
        stream = self._streams.get(request.message.client_id)
        if stream is not None:
            message = output_to_wire(request.message.request_id, output)
            stream.put_nowait(pb.StepOutputs(epoch=self._epoch, progress=self._progress, outputs=[message]))

    async def _unless_mute(self) -> None:
        while self.mute:
            await asyncio.sleep(0.01)


class FakeCluster:
    """Use as a context manager. `events`: (what, rank, id), in order. `paused` holds the leader's step loop."""

    def __init__(
        self,
        run_dir: Path,
        size: int = 2,
        tokens: Tokens = count_up,
        model: str = "fake",
        model_path: str = "",
        max_model_len: int = 256,
        step_s: float = 0.001,
    ) -> None:
        self.run_dir = run_dir
        self.size = size
        self.tokens = tokens
        self.model = model
        self.model_path = model_path
        self.max_model_len = max_model_len
        self.step_s = step_s
        self.adapters = (AdapterModule("sql", "/a").loaded(), AdapterModule("b", "/c", "base").loaded())
        self.epoch = 0
        self.paused = False
        self.events: list[tuple[str, int, str]] = []
        self.ranks: list[FakeRank] = []
        self._servers: list[grpc.aio.Server | None] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-cluster", daemon=True)

    def __enter__(self) -> FakeCluster:
        self._thread.start()
        self.start_epoch()
        return self

    def __exit__(self, *exc: object) -> None:
        self._run(self._stop_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def addresses(self) -> list[str]:
        return [f"unix:{socket_path(self.run_dir, rank, self.epoch)}" for rank in range(self.size)]

    def start_epoch(self) -> None:
        """All ranks, on new sockets, then cluster.json "ready"."""
        self.epoch += 1
        self._run(self._start_all())
        self.write("ready")

    def kill(self, rank: int, cause: str | None = None, will_restart: bool = False) -> None:
        """Ends one rank's server at once; with a cause the file says "down", as the supervisor's would."""
        self._run(self._stop(rank))
        if cause is not None:
            self.write("down", cause, will_restart)

    def write(self, state: str, cause: str = "", will_restart: bool = False) -> None:
        ranks = tuple(RankInfo(r, rank_pid(r), HOST, self.addresses[r]) for r in range(self.size))
        info = ClusterInfo(
            epoch=self.epoch,
            state=state,
            model=self.model,
            model_path=self.model_path,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            cause=cause,
            supervisor_pid=os.getpid(),
            ranks=ranks,
            will_restart=will_restart,
            adapters=self.adapters,
        )
        write_cluster(self.run_dir, info)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start_all(self) -> None:
        await self._stop_all()
        self.ranks = [FakeRank(self, rank, self.epoch) for rank in range(self.size)]
        self._servers = []
        for rank, address in zip(self.ranks, self.addresses, strict=True):
            server = grpc.aio.server(options=CHANNEL_OPTIONS)
            worker_pb2_grpc.add_WorkerServicer_to_server(rank, server)  # type: ignore[no-untyped-call]
            server.add_insecure_port(address)
            await server.start()
            self._servers.append(server)
        self._stepping = asyncio.create_task(self._step_loop(self.ranks[0]))

    async def _stop(self, rank: int) -> None:
        server, self._servers[rank] = self._servers[rank], None
        if rank == 0:
            self._stepping.cancel()
        if server is not None:
            await server.stop(None)

    async def _stop_all(self) -> None:
        for rank in range(len(self._servers)):
            await self._stop(rank)

    async def _step_loop(self, leader: FakeRank) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if not self.paused:
                leader.step()


def _timings(request: _Request) -> RequestTimings:
    total = time.monotonic() - request.started
    return RequestTimings(0.0, total, total, len(request.message.prompt_token_ids), 0, len(request.made))
