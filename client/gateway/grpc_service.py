"""The public gRPC service `allspan.v1.Inference` over the same admission as HTTP."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from allspan.client.gateway.generation import Generation, interleave
from allspan.client.gateway.origin import Origin, plain_name, trace_id
from allspan.client.gateway.submit import RETRY_AFTER_S, Job, Submitter, caller_error, spread
from allspan.protos import inference_pb2 as pb
from allspan.protos.errors import ERRORS, InvalidRequest, QueueFull
from allspan.protos.options import RequestOptions
from allspan.protos.results import TokenLogprob
from allspan.protos.text.stream import TextDelta

SERVICE = "allspan.v1.Inference"
LABEL = f"gRPC {SERVICE}/Generate"
MAX_REQUEST_ID_CHARS = 128
MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant")
OPTIONAL_FIELDS = (
    "max_tokens",
    "temperature",
    "do_sample",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "seed",
    "ignore_eos",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "suppress_repetition_in_generation",
    "no_repeat_ngram_size",
)
LIST_FIELDS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
SEQUENCE_FIELDS = ("bad_words_ids", "stop_words_ids")


class InferenceService:
    """Handlers on the gateway's loop. A cancelled or expired call cancels its handler, which stops the request."""

    def __init__(self, submitter: Submitter) -> None:
        self._submitter = submitter

    async def generate(self, request: pb.GenerateRequest | None, context: grpc.aio.ServicerContext) -> None:
        origin = _origin(request, context)
        try:
            jobs, request_id = await self._admit(request)
            async with (
                self._submitter.running(jobs, origin) as generations,
                aclosing(interleave(generations)) as deltas,
            ):
                name = request_id or generations[0].handle.request_id
                told = [0] * len(generations)  # prompt log-probabilities of each choice
                async for index, delta in deltas:
                    generation = generations[index]
                    response = _response(name, index, delta, generation)
                    for token_id, entry in generation.prompt_logprobs[told[index] :]:
                        response.prompt_logprobs.append(_logprob(token_id, entry))
                    told[index] = len(generation.prompt_logprobs)
                    await context.write(response)
            self._submitter.telemetry.grpc_calls["Generate", "OK"] += 1
        except Exception as error:
            await self._abort(context, origin, error)

    async def list_models(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        model = self._submitter.model
        return pb.ListModelsResponse(models=[pb.Model(id=model.name, max_model_len=model.max_model_len)])

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """For `grpc.method_handlers_generic_handler`: malformed bytes reach `generate` as None and get a status."""
        return {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, request_deserializer=_parsed, response_serializer=pb.GenerateResponse.SerializeToString
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models,
                request_deserializer=pb.ListModelsRequest.FromString,
                response_serializer=pb.ListModelsResponse.SerializeToString,
            ),
        }

    async def _admit(self, request: pb.GenerateRequest | None) -> tuple[list[Job], str]:
        if request is None:
            raise InvalidRequest("the message is no allspan.v1.GenerateRequest: its bytes cannot be parsed")
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(
                f"request_id has {len(request.request_id)} characters, at most {MAX_REQUEST_ID_CHARS}", "request_id"
            )
        if request.n > (most := self._submitter.limits.max_n):
            raise InvalidRequest(f"n is {request.n}, must be at most {most}", "n")
        options = _options(request)
        self._submitter.check_model(request.model)
        match request.WhichOneof("prompt"):
            case "text":
                token_ids = await self._submitter.encode(request.text, "text")
            case "token_ids":
                token_ids = await self._submitter.encode(list(request.token_ids.ids), "token_ids")
            case "chat":
                token_ids = await self._submitter.encode_chat(_messages(request.chat))
            case _:
                raise InvalidRequest("prompt is missing: set one of text, token_ids, chat", "prompt")
        fields = self._submitter.sampling(_sampling(request.sampling))
        params = self._submitter.params(fields, len(token_ids), default_max_tokens=None)
        job = Job(token_ids, params, request.WhichOneof("prompt") != "chat", options)
        return spread(job, max(request.n, 1)), request.request_id

    async def _abort(self, context: grpc.aio.ServicerContext, origin: Origin, error: Exception) -> NoReturn:
        """Ends the call with the status of the errors table; the trailers carry the code and the field by name."""
        shown = caller_error(error, origin.label)
        row = ERRORS[shown.code]
        telemetry = self._submitter.telemetry
        telemetry.refused(origin, shown, row.grpc)
        telemetry.grpc_calls["Generate", row.grpc] += 1
        trailers = [("allspan-error-code", shown.code)]
        if isinstance(shown, QueueFull):
            trailers.append(("retry-after", str(RETRY_AFTER_S)))
        if isinstance(shown, InvalidRequest) and shown.field:
            trailers.append(("allspan-error-field", shown.field.encode("ascii", "replace").decode()))
        await context.abort(grpc.StatusCode[row.grpc], shown.message, tuple(trailers))
        raise AssertionError("abort returns never")


def _origin(request: pb.GenerateRequest | None, context: grpc.aio.ServicerContext) -> Origin:
    name = request.request_id if request is not None else ""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return Origin(LABEL, plain_name(name), trace_id=trace_id(metadata))


def _parsed(data: bytes) -> pb.GenerateRequest | None:
    request = pb.GenerateRequest()
    try:
        request.ParseFromString(data)
    except DecodeError:
        return None
    return request


def _messages(chat: pb.Messages) -> list[dict[str, str]]:
    count = len(chat.messages)
    if not 1 <= count <= MAX_MESSAGES:
        raise InvalidRequest(f"chat.messages has {count} entries, must have from 1 to {MAX_MESSAGES}", "messages")
    for i, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"chat.messages[{i}].role is {message.role[:64]!r}, must be one of {', '.join(ROLES)}", "messages"
            )
    return [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in chat.messages
    ]


def _sampling(options: pb.SamplingOptions) -> dict[str, Any]:
    fields = {name: getattr(options, name) for name in OPTIONAL_FIELDS if options.HasField(name)}
    fields = {name: value for name, value in fields.items() if value != -1 or not name.endswith("logprobs")}
    fields |= {name: tuple(values) for name in LIST_FIELDS if (values := getattr(options, name))}
    for name in SEQUENCE_FIELDS:
        if sequences := getattr(options, name):
            fields[name] = tuple(tuple(sequence.ids) for sequence in sequences)
    if options.logit_bias:
        fields["logit_bias"] = dict(options.logit_bias)
    return fields


def _options(request: pb.GenerateRequest) -> RequestOptions:
    return RequestOptions(
        priority=request.priority,
        timeout_s=request.timeout_s or None,
        prefix_cache=request.prefix_cache if request.HasField("prefix_cache") else True,
        cache_salt=request.cache_salt,
    )


def _response(request_id: str, index: int, delta: TextDelta, generation: Generation) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=request_id,
        index=index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason,
    )
    for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False):
        response.logprobs.append(_logprob(token_id, entry))
    if delta.finished:
        response.usage.prompt_tokens = generation.num_prompt_tokens
        response.usage.completion_tokens = generation.num_output_tokens
        response.usage.cached_tokens = generation.num_cached_tokens
    return response


def _logprob(token_id: int, entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        chosen=pb.Logprob(token_id=token_id, logprob=entry.logprob),
        top=[pb.Logprob(token_id=top_id, logprob=logprob) for top_id, logprob in entry.top],
    )
