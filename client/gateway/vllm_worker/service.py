"""The gRPC service `vllm.grpc.engine.VllmEngine`: this server as a worker of the router SMG. Text never passes: the
router makes tokens of prompts and text of answers."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import aclosing
from datetime import UTC, datetime

import grpc

from allspan import __version__
from allspan.client.gateway.admission.active_request import interleave
from allspan.client.gateway.admission.admission import Job, jobs_per_choice
from allspan.client.gateway.auth.caller import current_caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.embeddings.embed import EmbedCall, embed
from allspan.client.gateway.grpc.calls import Calls
from allspan.client.gateway.grpc.server import Front
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.client.gateway.vllm_worker.answers import ChoiceAnswer
from allspan.client.gateway.vllm_worker.description import model_info, server_info
from allspan.client.gateway.vllm_worker.kv_journal import KvJournal
from allspan.client.gateway.vllm_worker.kv_stream import KvStream
from allspan.client.gateway.vllm_worker.loads import present_load, scheduler_load
from allspan.client.gateway.vllm_worker.operations import Operations
from allspan.client.gateway.vllm_worker.sampling import prompt_options, sampling_fields, text_options
from allspan.client.gateway.vllm_worker.tokenizer_archive import TokenizerArchive
from allspan.protos import vllm_worker_pb2 as pb
from allspan.protos.api.errors import DeadlineExceeded, InvalidRequest, RequestCancelled
from allspan.protos.api.options import MAX_TIMEOUT_S, RequestOptions

VLLM_SERVICE = "vllm.grpc.engine.VllmEngine"

_REFUSED = {
    "mm_inputs": "images are not supported",
    "extra_mm_inputs": "images are not supported",
    "media_refs": "images are not supported",
    "kv_transfer_params": "KV transfer is not supported",
    "kv_transfer_params_json": "KV transfer is not supported",
}


def worker_front(context: GatewayContext, address: str, held: socket.socket, journal: KvJournal) -> Front:
    """Returns the front of --worker-port."""
    own = pb.DESCRIPTOR.package
    services = {VLLM_SERVICE: VllmEngineService(context, journal).handlers()}
    return Front(address, held, services, (pb.DESCRIPTOR,), {own: VLLM_SERVICE.rpartition(".")[0]})


class VllmEngineService:
    """The handlers of the worker front, on the gateway's loop. A broken stream ends its request."""

    def __init__(self, context: GatewayContext, journal: KvJournal) -> None:
        self._context = context
        self._journal = journal
        self._calls = Calls(context, VLLM_SERVICE)
        self._tokenizer = TokenizerArchive(context)
        self._last_received = 0.0

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Returns the handlers by the methods' names."""
        calls, operations = self._calls, Operations(self._context)
        return {
            "Generate": calls.streaming("Generate", self.generate, pb.GenerateRequest),
            "Embed": calls.timed("Embed", _embed, pb.EmbedRequest),
            "HealthCheck": calls.unary("HealthCheck", self.health_check, pb.HealthCheckRequest),
            "Abort": calls.unary("Abort", self.abort, pb.AbortRequest),
            "GetModelInfo": calls.unary("GetModelInfo", self.get_model_info, pb.GetModelInfoRequest),
            "GetServerInfo": calls.unary("GetServerInfo", self.get_server_info, pb.GetServerInfoRequest),
            "GetLoads": calls.unary("GetLoads", self.get_loads, pb.GetLoadsRequest),
            "GetTokenizer": calls.streaming("GetTokenizer", self.get_tokenizer, pb.GetTokenizerRequest),
            "SubscribeKvEvents": calls.streaming("SubscribeKvEvents", self.subscribe, pb.SubscribeKvEventsRequest),
            "FlushCache": calls.unary("FlushCache", operations.flush_cache, pb.FlushCacheRequest),
            "StartProfile": calls.unary("StartProfile", operations.start_profile, pb.StartProfileRequest),
            "StopProfile": calls.unary("StopProfile", operations.stop_profile, pb.StopProfileRequest),
        }

    async def generate(self, request: pb.GenerateRequest, origin: Origin, context: grpc.aio.ServicerContext) -> None:
        self._last_received = time.time()
        with self._calls.named(origin, request.request_id):
            jobs = await self._jobs(request, context)
            if origin.is_aborted:
                raise RequestCancelled("the request was aborted before it began")
            await self._run(request, jobs, origin, context)

    async def health_check(self, request: pb.HealthCheckRequest) -> pb.HealthCheckResponse:
        cause = self._context.admission.down_cause
        return pb.HealthCheckResponse(healthy=not cause, message=cause or "the server takes requests")

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        caller = current_caller()
        for name in request.request_ids:
            await self._calls.abort(name, caller)
        return pb.AbortResponse()

    async def get_model_info(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        return await asyncio.to_thread(model_info, self._context)

    async def get_server_info(self, request: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        return await server_info(self._context, self._last_received)

    async def get_loads(self, request: pb.GetLoadsRequest) -> pb.GetLoadsResponse:
        loads = [] if request.dp_rank else [scheduler_load(await present_load(self._context))]
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=len(loads), loads=loads)

    async def get_tokenizer(
        self, request: pb.GetTokenizerRequest, origin: Origin, context: grpc.aio.ServicerContext
    ) -> None:
        for chunk in await self._tokenizer.chunks():
            await self._calls.write(context, chunk)

    async def subscribe(
        self, request: pb.SubscribeKvEventsRequest, origin: Origin, context: grpc.aio.ServicerContext
    ) -> None:
        stream = KvStream(self._context, self._journal, request)
        if stream.failure is None:
            await context.send_initial_metadata(())  # a router waits for it for two seconds at most
            async with aclosing(stream.batches()) as batches:
                async for batch in batches:
                    await self._calls.write(context, batch)
        if stream.failure is not None:
            code, details = stream.failure
            context.set_code(code)
            context.set_details(details)

    async def _jobs(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> list[Job]:
        _check(request)
        given, gateway = request.sampling_params, self._context
        if given.n > (most := gateway.config.limits.max_n):
            raise InvalidRequest(f"n is {given.n}, must be at most {most} (--max-n)", "n")
        reading = prompt_options(given)
        match request.WhichOneof("input"):
            case "tokenized":
                ids = await gateway.prompts.encode(list(request.tokenized.input_ids), "tokenized.input_ids", reading)
            case "text":
                ids = await gateway.prompts.encode(request.text, "text", reading)
            case _:
                raise InvalidRequest("input is missing: set one of tokenized, text", "input")
        fields = sampling_fields(given, gateway.model.max_model_len - len(ids))
        params = gateway.sampling.params(fields, len(ids), default_max_tokens=None)
        options = _options(context.time_remaining())
        job = Job(ids, params, True, options, text_options(given), None, "sampling_params.constraint")
        return jobs_per_choice(job, max(given.n, 1))

    async def _run(
        self, request: pb.GenerateRequest, jobs: list[Job], origin: Origin, context: grpc.aio.ServicerContext
    ) -> None:
        async with (
            self._context.admission.running(jobs, origin) as generations,
            aclosing(interleave(generations)) as deltas,
        ):
            stop_ids, streams = request.sampling_params.stop_token_ids, request.stream
            answers = [
                ChoiceAnswer(i, generation, jobs[i].token_ids, stop_ids, streams)
                for i, generation in enumerate(generations)
            ]
            unfinished = dict(enumerate(answers))
            try:
                async for index, delta in deltas:
                    for response in answers[index].add(delta):
                        await self._calls.write(context, response)
                    if delta.finished:
                        del unfinished[index]
            except RequestCancelled:
                if not origin.is_aborted:
                    raise
                for answer in unfinished.values():
                    await self._calls.write(context, answer.end("abort"))


def _check(request: pb.GenerateRequest) -> None:
    """Raises InvalidRequest for what no request may have here."""
    for descriptor, _ in request.ListFields():
        if descriptor.name in _REFUSED:
            raise InvalidRequest(f"{descriptor.name} is set, but {_REFUSED[descriptor.name]} here", descriptor.name)
    if request.data_parallel_rank not in (0, -1):
        raise InvalidRequest(
            f"data_parallel_rank is {request.data_parallel_rank}, must be 0: this server spreads requests over its "
            "replicas by itself",
            "data_parallel_rank",
        )


async def _embed(
    context: GatewayContext, request: pb.EmbedRequest, origin: Origin, time_left: float | None
) -> pb.EmbedResponse:
    call = EmbedCall([list(request.tokenized.input_ids)], "tokenized.input_ids", options=_options(time_left))
    made = await embed(context, call, origin)
    (vector,) = made.vectors
    return pb.EmbedResponse(embedding=vector.tolist(), prompt_tokens=made.num_tokens, embedding_dim=len(vector))


def _options(time_left: float | None) -> RequestOptions:
    """Returns the options of a call whose deadline leaves so many seconds. DeadlineExceeded."""
    if time_left is None or time_left >= MAX_TIMEOUT_S:
        return RequestOptions()
    if time_left <= 0:
        raise DeadlineExceeded("the call's deadline was over before the request was read")
    return RequestOptions(timeout_s=time_left)
