"""The methods of allspan.worker.v1.Worker. They run on the service's asyncio loop and never wait for the step loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc

from allspan.protos import worker_pb2 as pb
from allspan.protos.api.counters import EngineCounters
from allspan.protos.api.errors import ERRORS, AllspanError, InternalError, InvalidRequest
from allspan.protos.config.settings import WorkerConfig
from allspan.protos.convert import adapter_from_wire, adapter_to_wire, adapters_to_wire, counters_to_wire
from allspan.protos.worker_pb2_grpc import WorkerServicer
from allspan.worker.cache.page_log import PageLog
from allspan.worker.engine.live_adapters import LiveAdapters
from allspan.worker.process.host import peak_rss_bytes, rss_bytes
from allspan.worker.sampling.grammar import CompiledGrammar
from allspan.worker.sampling.grammar_cache import COMPILE_S, Grammars, took_too_long
from allspan.worker.scheduler.counters import Load
from allspan.worker.scheduler.plan import Operation
from allspan.worker.scheduler.request import Request
from allspan.worker.service.call_queue import CallQueue
from allspan.worker.service.leader_news import TOKEN_IDS, LeaderNews, PageEventStream, check_page_events
from allspan.worker.service.leases import Lease, Leases
from allspan.worker.service.load_reader import LoadReader
from allspan.worker.service.messages import request_from_wire, request_ids_from_wire

HEARTBEAT_MS = (50, 60_000)
MAX_TIMEOUT_S = 86_400.0
PROFILE_TIMEOUT_S = 20.0
"""To begin or end profiling, where the caller says nothing."""


Inspect = Callable[[str], dict[str, Any]]
"""The answer to an InspectRequest; see `allspan.worker.load.introspection`."""

logger = logging.getLogger(__name__)
Reply = TypeVar("Reply")
Message = TypeVar("Message")


class Core(Protocol):
    """What the service asks of the engine; every method may be called from its thread."""

    grammars: Grammars
    adapters: LiveAdapters

    @property
    def is_leader(self) -> bool: ...
    @property
    def progress(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def refusal(self) -> str: ...
    @property
    def advance(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def progress_age_s(self) -> float: ...
    def submit(self, request: Request) -> None: ...
    def cancel(self, request_ids: Iterable[bytes]) -> None: ...
    def start_model(self) -> None: ...
    def stop_model(self, timeout: float) -> None: ...
    def operate(self, operation: Operation, timeout: float) -> None: ...
    def rebalance_experts(self, timeout: float) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def shutdown(self) -> None: ...
    @property
    def page_log(self) -> PageLog | None: ...
    def load(self) -> Load: ...
    def statistics(self) -> EngineCounters: ...


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What does not change while a rank serves."""

    rank: int
    world_size: int
    host: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kernels: str
    device: str
    numa_nodes: str
    threads: int
    load_s: float
    weight_bytes: int
    kv_bytes: int
    prompt_lengths: tuple[int, ...] = ()
    """See `RowInputs.prompt_lengths`."""


def translated(method: Callable[..., Awaitable[Reply]]) -> Callable[..., Awaitable[Reply]]:
    """Turns our errors into gRPC statuses. Anything else is our bug: logged, and sent as INTERNAL."""

    @functools.wraps(method)
    async def call(self: Any, message: Any, context: grpc.aio.ServicerContext) -> Reply:
        try:
            return await method(self, parsed(message), context)
        except AllspanError as error:
            await refuse(context, error)
            raise
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            await refuse(context, InternalError(f"{type(error).__name__}: {error}"))
            raise

    return call


def parsed(message: Message | None) -> Message:
    """What the server could not parse comes as None."""
    if message is None:
        raise InvalidRequest("the message is not the protobuf that this method takes")
    return message


async def refuse(context: grpc.aio.ServicerContext, error: AllspanError) -> None:
    """Ends the call with the error's status, and its code and field as trailing metadata. Always raises."""
    trailing = [("allspan-code", error.code)]
    if isinstance(error, InvalidRequest) and error.field:
        trailing.append(("allspan-field", error.field))
    await context.abort(grpc.StatusCode[ERRORS[error.code].grpc], error.message, tuple(trailing))


async def compiled(compiling: concurrent.futures.Future[CompiledGrammar]) -> CompiledGrammar:
    """Waits for it. It goes on when this is cancelled: others may wait for it, too. Raises InvalidRequest."""
    waiting = asyncio.wrap_future(compiling)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait((waiting,), timeout=COMPILE_S)
    if not waiting.done():
        raise took_too_long()
    return waiting.result()


class RankServicer(WorkerServicer):
    """One rank's answers. `leases` is shared with the server, which delivers outputs to it."""

    def __init__(
        self, core: Core, leases: Leases, facts: RankFacts, config: WorkerConfig, inspect: Inspect, experts: LoadReader
    ) -> None:
        self._core = core
        self._leases = leases
        self._facts = facts
        self._inspect = inspect
        self._experts = experts
        self._controls: dict[str, Callable[[float], None]] = {
            "start_model": lambda timeout: core.start_model(),
            "stop_model": core.stop_model,
            "shutdown": lambda timeout: core.shutdown(),
            "reset_prefix_cache": lambda timeout: core.reset_prefix_cache(),
            "unload_weights": functools.partial(core.operate, Operation.UNLOAD_WEIGHTS),
            "reload_weights": functools.partial(core.operate, Operation.RELOAD_WEIGHTS),
            "rebalance_experts": core.rebalance_experts,
            "start_profile": lambda timeout: core.operate(Operation.START_PROFILE, timeout or PROFILE_TIMEOUT_S),
            "stop_profile": lambda timeout: core.operate(Operation.STOP_PROFILE, timeout or PROFILE_TIMEOUT_S),
        }
        self._model = config.model
        self._epoch, self._lora_dir = config.service.epoch, config.adapters.lora_dir
        self._loads, self._unloads = CallQueue("loads of adapters"), CallQueue("unloads of adapters")
        self._news: dict[str, LeaderNews] = {}
        """What each open stream is told, by its client's id."""

    @translated
    async def StartRequest(self, message: pb.StartRequestMessage, context: grpc.aio.ServicerContext) -> pb.Ack:
        request = request_from_wire(message, self._model.name, self._epoch)
        if request.params.grammar is not None:
            self._leases.find(request.client_id)
            request.grammar = await compiled(self._core.grammars.begin(request.params.grammar))
        lease = self._leases.find(request.client_id)
        self._core.submit(request)
        lease.add(request.request_id)
        return pb.Ack()

    @translated
    async def StopRequest(self, message: pb.RequestIds, context: grpc.aio.ServicerContext) -> pb.Ack:
        request_ids = request_ids_from_wire(message)
        self._core.cancel(request_ids)
        if not self._core.is_leader:
            self._leases.forget(request_ids)
        return pb.Ack()

    async def Results(
        self, message: pb.ResultsSubscription, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepOutputs]:
        try:
            message = parsed(message)
            heartbeat = _heartbeat_s(message.heartbeat_ms)
            check_page_events(message.page_events)
            lease = self._leases.open(message.client_id)
        except AllspanError as error:
            await refuse(context, error)
            raise
        told = self._news[message.client_id] = self._told(message.page_events)
        try:
            yield self._step_outputs([], told)
            async for outputs in _outputs(lease, heartbeat, told):
                yield self._step_outputs(outputs, told)
        finally:
            del self._news[message.client_id]
            told.close()
            open_requests = self._leases.close(lease)
            if open_requests and self._core.is_leader:
                logger.info("client %s left with %d open requests", lease.client_id, len(open_requests))
            self._core.cancel(open_requests)

    @translated
    async def ResendPages(self, message: pb.ResendPagesRequest, context: grpc.aio.ServicerContext) -> pb.Ack:
        """InvalidRequest for a client without a stream."""
        lease = self._leases.find(message.client_id)
        self._news[lease.client_id].resend_pages()
        lease.news.set()
        return pb.Ack()

    @translated
    async def Status(self, message: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.WorkerStatus:
        core, facts = self._core, self._facts
        return pb.WorkerStatus(
            rank=facts.rank,
            world_size=facts.world_size,
            epoch=self._epoch,
            pid=os.getpid(),
            host=facts.host,
            state=core.state,
            progress=core.progress,
            progress_age_s=core.progress_age_s,
            model=self._model.name,
            model_path=self._model.path,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            statistics=self._statistics(),
            kernels=facts.kernels,
            eos_token_ids=facts.eos_token_ids,
            device=facts.device,
            numa_nodes=facts.numa_nodes,
            threads=facts.threads,
            experts=await self._experts.read(),
            adapters=map(adapter_to_wire, core.adapters.listed()[1]),
            lora_dir=self._lora_dir,
        )

    @translated
    async def Control(self, message: pb.ControlRequest, context: grpc.aio.ServicerContext) -> pb.Ack:
        """InvalidRequest for an unknown operation or on a follower; DeadlineExceeded when it takes too long; else what
        the engine raises."""
        self._check_leader()
        control = self._controls.get(message.operation)
        if control is None:
            raise InvalidRequest(
                f"operation is {message.operation!r}, must be one of {', '.join(self._controls)}", "operation"
            )
        await asyncio.to_thread(control, _timeout_s(message.timeout_s))
        return pb.Ack()

    @translated
    async def LoadAdapter(self, message: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext) -> pb.AdapterReply:
        """InvalidRequest on a follower; QueueFull for too many at once; else what `LiveAdapters.load` raises."""
        self._check_leader()
        load = functools.partial(self._core.adapters.load, adapter_from_wire(message.adapter))
        await self._loads.run(load, _timeout_s(message.timeout_s))
        self._tell_all()
        return pb.AdapterReply(adapters=adapters_to_wire(*self._core.adapters.listed()))

    @translated
    async def UnloadAdapter(
        self, message: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.AdapterReply:
        """InvalidRequest on a follower; QueueFull for too many at once; else what `LiveAdapters.unload` raises."""
        self._check_leader()
        unload = functools.partial(self._core.adapters.unload, message.name)
        left = await self._unloads.run(unload, _timeout_s(message.timeout_s))
        self._tell_all()
        return pb.AdapterReply(adapters=adapters_to_wire(*self._core.adapters.listed()), num_requests=left)

    @translated
    async def Inspect(self, message: pb.InspectRequest, context: grpc.aio.ServicerContext) -> pb.InspectReply:
        """InvalidRequest for something that is not known; CheckpointError when the files are gone."""
        return pb.InspectReply(json=json.dumps(await asyncio.to_thread(self._inspect, message.what)))

    def _tell_all(self) -> None:
        """Has every stream tell what is new, without waiting for a heartbeat."""
        for client_id in self._news:
            self._leases.find(client_id).news.set()

    def _check_leader(self) -> None:
        if not self._core.is_leader:
            raise InvalidRequest(f"this is rank {self._facts.rank}, operations go to rank 0", "operation")

    def _step_outputs(self, outputs: list[pb.RequestOutput], told: LeaderNews) -> pb.StepOutputs:
        core = self._core
        message = pb.StepOutputs(
            step=core.steps, epoch=self._epoch, outputs=outputs, progress=core.advance, refusal=core.refusal
        )
        told.add_to(message)
        return message

    def _told(self, page_events: int) -> LeaderNews:
        core = self._core
        if not core.is_leader:
            return LeaderNews()
        log, wants_tokens = core.page_log, page_events == TOKEN_IDS
        if log is None or not page_events:  # a log without pages yet is false
            return LeaderNews(core.load, core.adapters.listed)
        return LeaderNews(
            core.load, core.adapters.listed, PageEventStream(log, self._facts.prompt_lengths, wants_tokens)
        )

    def _statistics(self) -> pb.Statistics:
        counted = self._core.statistics()
        return pb.Statistics(
            counters=counters_to_wire(counted),
            load_s=self._facts.load_s,
            peak_rss_bytes=peak_rss_bytes(),
            rss_bytes=rss_bytes(),
            weight_bytes=self._facts.weight_bytes if counted.weights_loaded else 0,
            kv_bytes=self._facts.kv_bytes if counted.weights_loaded else 0,
        )


async def _outputs(lease: Lease, heartbeat: float, told: LeaderNews) -> AsyncIterator[list[pb.RequestOutput]]:
    """What the lease gathers, as fast as the reader takes it; an empty list after `heartbeat` seconds without, or at
    once while there are more page events than go into one message."""
    loop = asyncio.get_running_loop()
    while True:
        if outputs := lease.take():
            yield outputs
        elif lease.closing:
            return
        elif told.has_more:
            yield []
        else:
            alarm = loop.call_later(heartbeat, lease.news.set)
            try:
                await lease.news.wait()
            finally:
                alarm.cancel()
            if lease.is_empty:
                yield []


def _heartbeat_s(milliseconds: int) -> float:
    least, most = HEARTBEAT_MS
    if milliseconds and not least <= milliseconds <= most:
        raise InvalidRequest(
            f"heartbeat_ms is {milliseconds}, must be from {least} to {most}, or 0 for 1000", "heartbeat_ms"
        )
    return (milliseconds or 1000) / 1000


def _timeout_s(seconds: float) -> float:
    if not math.isfinite(seconds) or not 0 <= seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"timeout_s is {seconds}, must be from 0 to {MAX_TIMEOUT_S:g}", "timeout_s")
    return seconds
