"""Embeddings of texts and token ids: from checked fields to vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from allspan.client.gateway.admission.admission import Job
from allspan.client.gateway.admission.prompts import AS_USUAL, PromptOptions
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.embeddings.runner import Pooled, VectorRunner
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos.api.options import RequestOptions
from allspan.protos.embeddings.calls import NOTHING_SAMPLED
from allspan.protos.embeddings.vectors import Floats, embedding

Input = str | list[int]
PARAMS = NOTHING_SAMPLED.with_(seed=0)


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """The fields of a call, whatever its protocol."""

    inputs: Sequence[Input]
    name: str = "input"
    """The field of the inputs, for messages."""
    dimensions: int | None = None
    normalize: bool | None = None
    """None: as the model says."""
    input_type: str | None = None
    reading: PromptOptions = AS_USUAL
    options: RequestOptions = field(default_factory=RequestOptions)


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of a call, and the tokens that were read for them."""

    vectors: list[Floats]
    num_tokens: int


async def embed(context: GatewayContext, call: EmbedCall, origin: Origin) -> Embedded:
    """Checks everything, runs all inputs together, and cuts and normalises the results. InvalidRequest names the
    field."""
    card = context.model.card
    card.check_dimensions(call.dimensions)
    before = card.prompt(call.input_type)
    options = replace(call.options, pooling=card.pooling)
    jobs: list[Job] = []
    for place, given in enumerate(call.inputs):
        name = call.name if len(call.inputs) == 1 else f"{call.name}[{place}]"
        text = before + given if isinstance(given, str) and given else given
        ids = await context.prompts.encode(text, name, call.reading)
        jobs.append(Job(ids, PARAMS, options=options))
    results = await VectorRunner(context, jobs, origin).run()
    normalize = card.normalize if call.normalize is None else call.normalize
    vectors = [embedding(result.vector, call.dimensions, normalize) for result in results]
    return Embedded(vectors, count(results))


def count(results: Sequence[Pooled]) -> int:
    """Tokens that were read for these results."""
    return sum(result.num_tokens for result in results)
