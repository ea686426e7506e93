"""The public gRPC service `allspan.v1.Inference` over the same admission as HTTP."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import PurePath

import grpc

from allspan.client.gateway.adapters import AdapterOperator
from allspan.client.gateway.admission.active_request import interleave
from allspan.client.gateway.admission.admission import Job, jobs_per_choice
from allspan.client.gateway.admission.prompts import PromptOptions
from allspan.client.gateway.auth.caller import current_caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.grpc.calls import Calls
from allspan.client.gateway.grpc.embeddings import embed_reply, score_reply
from allspan.client.gateway.grpc.messages import (
    messages_of,
    options_of,
    prompt_options_of,
    responses,
    sampling_of,
    text_options_of,
)
from allspan.client.gateway.offload import INLINE_CHARS
from allspan.client.gateway.server_info import server_info
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import InvalidRequest, RequestCancelled
from allspan.protos.api.results import TokenLogprob
from allspan.protos.text.stream.text_stream import TextDelta

SERVICE = "allspan.v1.Inference"


class InferenceService:
    """The handlers of the inference service, on the gateway's loop. A cancelled or expired call cancels its handler,
    which stops the request."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._calls = Calls(context, SERVICE)
        self._adapters = AdapterOperator(context)

    async def generate(self, request: pb.GenerateRequest, origin: Origin, context: grpc.aio.ServicerContext) -> None:
        with self._calls.named(origin, request.request_id):
            jobs = await self._jobs(request, context)
            if origin.is_aborted:
                raise RequestCancelled("the request was aborted before it began")
            await self._run(request, jobs, origin, context)

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
        adapters = (
            pb.Model(id=each.name, max_model_len=model.max_model_len, parent=each.base_model_name or model.name)
            for each in model.adapters
        )
        return pb.ListModelsResponse(models=[pb.Model(id=model.name, max_model_len=model.max_model_len), *adapters])

    async def load_lora(self, request: pb.LoadLoraRequest) -> pb.LoadLoraResponse:
        await self._adapters.load(request.lora_name, request.lora_path, request.base_model_name)
        return pb.LoadLoraResponse()

    async def unload_lora(self, request: pb.UnloadLoraRequest) -> pb.UnloadLoraResponse:
        return pb.UnloadLoraResponse(running=await self._adapters.unload(request.lora_name))

    async def list_loras(self, request: pb.ListLorasRequest) -> pb.ListLorasResponse:
        model = self._context.model
        loras = (
            pb.Lora(name=each.name, parent=each.base_model_name or model.name, root=PurePath(each.path).name)
            for each in model.adapters
        )
        return pb.ListLorasResponse(loras=loras)

    async def server_info(self, request: pb.ServerInfoRequest) -> pb.ServerInfoResponse:
        return await server_info(self._context)

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id is empty, must name a request", "request_id")
        return pb.AbortResponse(aborted=await self._calls.abort(request.request_id, current_caller()))

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Returns the handlers for `grpc.method_handlers_generic_handler`."""
        calls = self._calls
        return {
            "Generate": calls.streaming("Generate", self.generate, pb.GenerateRequest),
            "Embed": calls.timed("Embed", embed_reply, pb.EmbedRequest),
            "Score": calls.timed("Score", score_reply, pb.ScoreRequest),
            "Tokenize": calls.unary("Tokenize", self.tokenize, pb.TokenizeRequest),
            "Detokenize": calls.unary("Detokenize", self.detokenize, pb.DetokenizeRequest),
            "ListModels": calls.unary("ListModels", self.list_models, pb.ListModelsRequest),
            "LoadLora": calls.unary("LoadLora", self.load_lora, pb.LoadLoraRequest),
            "UnloadLora": calls.unary("UnloadLora", self.unload_lora, pb.UnloadLoraRequest),
            "ListLoras": calls.unary("ListLoras", self.list_loras, pb.ListLorasRequest),
            "ServerInfo": calls.unary("ServerInfo", self.server_info, pb.ServerInfoRequest),
            "Abort": calls.unary("Abort", self.abort, pb.AbortRequest),
        }

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
        options = self._context.model.with_adapter(options_of(request, context.time_remaining()), request.model)
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
                    await self._calls.write(context, response)


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
