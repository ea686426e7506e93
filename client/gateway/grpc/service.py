"""The public gRPC service `allspan.v1.Inference` over the same admission as HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from allspan.client.gateway.admission.active_request import interleave
from allspan.client.gateway.admission.admission import Job, caller_error, jobs_per_choice
from allspan.client.gateway.admission.prompts import PromptOptions
from allspan.client.gateway.auth.caller import current_caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.grpc.embeddings import embed_reply, score_reply
from allspan.client.gateway.grpc.messages import (
    messages_of,
    options_of,
    prompt_options_of,
    responses,
    sampling_of,
    text_options_of,
)
from allspan.client.gateway.grpc.status import shown_message, status_code, trailers_of
from allspan.client.gateway.offload import INLINE_CHARS
from allspan.client.gateway.server_info import server_info
from allspan.client.gateway.telemetry.request_context import Origin, plain_name, traceparent
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import AlreadyExists, InvalidRequest, RequestCancelled, StreamNotRead
from allspan.protos.api.results import TokenLogprob
from allspan.protos.text.stream.text_stream import TextDelta

SERVICE = "allspan.v1.Inference"

_NAME = re.compile(r"[!-~]{1,128}")

Request = TypeVar("Request", bound=Message)


class InferenceService:
    """The handlers of the inference service, on the gateway's loop. A cancelled or expired call cancels its handler,
    which stops the request."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._calls: set[Origin] = set()
        """The running calls of Generate that have a request id."""

    async def generate(self, request: pb.GenerateRequest | None, context: grpc.aio.ServicerContext) -> None:
        origin = _origin("Generate", request, context)
        try:
            request = _parsed(request, pb.GenerateRequest)
            with self._named(origin, request.request_id):
                jobs = await self._jobs(request, context)
                if origin.is_aborted:
                    raise RequestCancelled("the request was aborted before it began")
                await self._run(request, jobs, origin, context)
            self._context.telemetry.grpc_calls["Generate", "OK"] += 1
        except Exception as error:
            await self._refuse(context, origin, error)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        self._context.model.check_name(request.model)
        options = prompt_options_of(request)
        match request.WhichOneof("prompt"):
            case "text":
                ids = await self._context.prompts.encode(request.text, "text", options)
            case "chat":
                ids = await self._context.prompts.encode_chat(messages_of(request.chat), options)
            case _:
                raise InvalidRequest("prompt is missing: set one of text, chat", "prompt")
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._context.model.max_model_len)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        self._context.model.check_name(request.model)
        ids = await self._context.prompts.encode(list(request.token_ids), "token_ids", PromptOptions(only_counted=True))
        decode, skip = self._context.tokenizer.decode, request.skip_special_tokens
        return pb.DetokenizeResponse(
            text=decode(ids, skip) if len(ids) <= INLINE_CHARS else await asyncio.to_thread(decode, ids, skip)
        )

    async def list_models(self, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        model = self._context.model
        return pb.ListModelsResponse(models=[pb.Model(id=model.name, max_model_len=model.max_model_len)])

    async def server_info(self, request: pb.ServerInfoRequest) -> pb.ServerInfoResponse:
        return await server_info(self._context)

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id is empty, must name a request", "request_id")
        caller = current_caller()
        for origin in self._calls:  # also those that are not admitted yet
            if origin.name == request.request_id and caller.may_end(origin.owner):
                origin.is_aborted = True
        return pb.AbortResponse(aborted=await self._context.admission.abort(request.request_id, caller))

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Returns the handlers for `grpc.method_handlers_generic_handler`."""
        return {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, _leniently(pb.GenerateRequest), pb.GenerateResponse.SerializeToString
            ),
            "Embed": self._timed("Embed", embed_reply, pb.EmbedRequest),
            "Score": self._timed("Score", score_reply, pb.ScoreRequest),
            "Tokenize": self._unary("Tokenize", self.tokenize, pb.TokenizeRequest),
            "Detokenize": self._unary("Detokenize", self.detokenize, pb.DetokenizeRequest),
            "ListModels": self._unary("ListModels", self.list_models, pb.ListModelsRequest),
            "ServerInfo": self._unary("ServerInfo", self.server_info, pb.ServerInfoRequest),
            "Abort": self._unary("Abort", self.abort, pb.AbortRequest),
        }

    def _unary(
        self, name: str, method: Callable[[Request], Awaitable[Message]], kind: type[Request]
    ) -> grpc.RpcMethodHandler:
        async def handle(request: Request | None, context: grpc.aio.ServicerContext) -> Message:
            try:
                reply = await method(_parsed(request, kind))
            except Exception as error:
                await self._refuse(context, _origin(name, request, context), error)
            self._context.telemetry.grpc_calls[name, "OK"] += 1
            return reply

        return grpc.unary_unary_rpc_method_handler(handle, _leniently(kind), _serialized)

    def _timed(
        self, name: str, method: Callable[..., Awaitable[Message]], kind: type[Request]
    ) -> grpc.RpcMethodHandler:
        """A unary method that runs requests: it knows its call, and the time that this leaves."""

        async def handle(request: Request | None, context: grpc.aio.ServicerContext) -> Message:
            origin = _origin(name, request, context)
            try:
                reply = await method(self._context, _parsed(request, kind), origin, context.time_remaining())
            except Exception as error:
                await self._refuse(context, origin, error)
            self._context.telemetry.grpc_calls[name, "OK"] += 1
            return reply

        return grpc.unary_unary_rpc_method_handler(handle, _leniently(kind), _serialized)

    async def _jobs(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> list[Job]:
        if request.n > (most := self._context.config.limits.max_n):
            raise InvalidRequest(f"n is {request.n}, must be at most {most}", "n")
        options_of(request, None)  # what does not fit is refused before anything is tokenised
        self._context.model.check_name(request.model)
        reading = prompt_options_of(request)
        match request.WhichOneof("prompt"):
            case "text":
                token_ids = await self._context.prompts.encode(request.text, "text", reading)
            case "token_ids":
                token_ids = await self._context.prompts.encode(list(request.token_ids.ids), "token_ids", reading)
            case "chat":
                token_ids = await self._context.prompts.encode_chat(messages_of(request.chat), reading)
            case _:
                raise InvalidRequest("prompt is missing: set one of text, token_ids, chat", "prompt")
        fields = self._context.sampling.fields(sampling_of(request.sampling))
        params = self._context.sampling.params(fields, len(token_ids), default_max_tokens=None)
        options = options_of(request, context.time_remaining())
        is_chat = request.WhichOneof("prompt") == "chat"
        job = Job(
            token_ids, params, not is_chat, options, text_options_of(request.sampling), None, "sampling.structured"
        )
        return jobs_per_choice(job, max(request.n, 1))

    async def _run(
        self, request: pb.GenerateRequest, jobs: list[Job], origin: Origin, context: grpc.aio.ServicerContext
    ) -> None:
        async with (
            self._context.admission.running(jobs, origin) as generations,
            aclosing(interleave(generations)) as deltas,
        ):
            name = request.request_id or generations[0].handle.request_id
            is_whole = request.HasField("stream") and not request.stream
            wholes = [_Whole() for _ in generations] if is_whole else None
            told = [0] * len(generations)  # prompt log-probabilities of each choice
            async for index, part in deltas:
                delta = part if wholes is None else wholes[index].add(part)
                if delta is None:
                    continue
                generation = generations[index]
                prompt_logprobs = generation.prompt_logprobs[told[index] :]
                told[index] = len(generation.prompt_logprobs)
                for response in responses(name, index, delta, prompt_logprobs, generation):
                    await self._write(context, response)

    async def _write(self, context: grpc.aio.ServicerContext, response: pb.GenerateResponse) -> None:
        """Waits while the client does not read and gRPC's window is full; what comes meanwhile is merged behind it."""
        limit = self._context.config.grpc.grpc_stream_timeout
        await asyncio.sleep(0)  # after all that a step brought is ready: what is sent at one go wakes readers less
        try:
            async with asyncio.timeout(limit):
                await context.write(response)
        except TimeoutError:
            raise StreamNotRead(f"the stream was not read for {limit:g} s (--grpc-stream-timeout)") from None

    @contextlib.contextmanager
    def _named(self, origin: Origin, request_id: str) -> Iterator[None]:
        """Registers a call under its request id; AlreadyExists while another call of the same caller has it;
        InvalidRequest for an invalid one."""
        if not request_id:
            yield
            return
        if not _NAME.fullmatch(request_id):
            raise InvalidRequest(
                f"request_id is {request_id[:64]!r} ({len(request_id)} characters), must be 1 to 128 printable ASCII "
                "characters without spaces",
                "request_id",
            )
        if any(call.name == request_id and call.owner == origin.owner for call in self._calls):
            raise AlreadyExists(f"request_id {request_id} is running already; give each request a name of its own")
        self._calls.add(origin)
        try:
            yield
        finally:
            self._calls.discard(origin)

    async def _refuse(self, context: grpc.aio.ServicerContext, origin: Origin, error: Exception) -> NoReturn:
        """Ends the call with the status of the errors table; see `grpc_status`."""
        shown = caller_error(error, origin.label)
        code = status_code(shown)
        telemetry = self._context.telemetry
        telemetry.refused(origin, shown, code.name)
        telemetry.grpc_calls[origin.label.rpartition("/")[2], code.name] += 1
        await context.abort(code, shown_message(shown), trailers_of(shown, origin.name))
        raise AssertionError("abort returns never")


class _Whole:
    """The collected output of one choice of a request that does not stream."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, delta: TextDelta) -> TextDelta | None:
        """Adds a delta; returns the whole output with the last one, None before."""
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        if not delta.finished:
            return None
        ids, logprobs = tuple(self._token_ids), tuple(self._logprobs)
        return TextDelta("".join(self._texts), ids, logprobs, delta.finish_reason, delta.stop)


def _origin(method: str, request: Any, context: grpc.aio.ServicerContext) -> Origin:
    name = request.request_id if isinstance(request, pb.GenerateRequest) else ""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return Origin(f"gRPC {SERVICE}/{method}", plain_name(name), traceparent=traceparent(metadata))


def _leniently(kind: type[Request]) -> Callable[[bytes], Request | None]:
    """Returns a parser that gives None for invalid bytes, so that the handler can report it; gRPC alone would answer
    INTERNAL."""

    def parse(data: bytes) -> Request | None:
        message: Request = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return None
        return message

    return parse


def _parsed(request: Request | None, kind: type[Request]) -> Request:
    if request is None:
        raise InvalidRequest(f"the message is no {kind.DESCRIPTOR.full_name}: its bytes cannot be parsed")
    return request


def _serialized(message: Message) -> bytes:
    return bytes(message.SerializeToString())
