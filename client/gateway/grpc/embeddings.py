"""Embed and Score over gRPC: messages to checked calls, and results to messages."""

from __future__ import annotations

from allspan.client.gateway.admission.prompts import PromptOptions
from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.embeddings.embed import EmbedCall, Input, embed
from allspan.client.gateway.embeddings.score import score
from allspan.client.gateway.grpc.messages import options_of
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.embeddings.calls import text_pairs


async def embed_reply(
    context: GatewayContext, request: pb.EmbedRequest, origin: Origin, time_left: float | None
) -> pb.EmbedResponse:
    """Raises InvalidRequest naming the field."""
    context.model.check_name(request.model)
    if bool(request.texts) == bool(request.token_ids):
        raise InvalidRequest("texts and token_ids: one of them must be given, and only one", "texts")
    inputs: list[Input] = list(request.texts) or [list(each.ids) for each in request.token_ids]
    name = "texts" if request.texts else "token_ids"
    _check_count(len(inputs), name, context.config.limits)
    last = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    call = EmbedCall(
        inputs,
        name,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        normalize=request.normalize if request.HasField("normalize") else None,
        input_type=request.input_type if request.HasField("input_type") else None,
        reading=PromptOptions(last_tokens=last),
        options=context.model.with_adapter(options_of(request, time_left), request.model),
    )
    made = await embed(context, call, origin)
    return pb.EmbedResponse(
        model=context.model.answered(call.options),
        embeddings=[pb.Embedding(values=vector.tolist()) for vector in made.vectors],
        prompt_tokens=made.num_tokens,
    )


async def score_reply(
    context: GatewayContext, request: pb.ScoreRequest, origin: Origin, time_left: float | None
) -> pb.ScoreResponse:
    """Raises InvalidRequest naming the field."""
    context.model.check_name(request.model)
    _check_count(len(request.documents), "documents", context.config.limits)
    pairs = text_pairs(list(request.queries), list(request.documents))
    instruction = request.instruction if request.HasField("instruction") else None
    options = context.model.with_adapter(options_of(request, time_left), request.model)
    made = await score(context, pairs, instruction, options, origin)
    return pb.ScoreResponse(model=context.model.answered(options), scores=made.scores, prompt_tokens=made.num_tokens)


def _check_count(count: int, name: str, limits: LimitsConfig) -> None:
    if count > limits.max_embedding_inputs:
        raise InvalidRequest(f"{name} has {count} entries, at most {limits.max_embedding_inputs} a request", name)
