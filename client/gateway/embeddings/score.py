"""Scores of queries and documents: by a reranker's head, or by the angle between two vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from allspan.client.gateway.admission.admission import Job
from allspan.client.gateway.admission.prompts import PromptOptions
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.embeddings.embed import PARAMS, count
from allspan.client.gateway.embeddings.runner import VectorRunner
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.options import RequestOptions
from allspan.protos.embeddings.rerank import RerankHead
from allspan.protos.embeddings.vectors import cosine, embedding, probability


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of pairs, and the tokens that were read for them."""

    scores: list[float]
    num_tokens: int


async def score(
    context: GatewayContext,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    options: RequestOptions,
    origin: Origin,
) -> Scored:
    """Runs all pairs together. InvalidRequest names the field."""
    head = context.model.card.head
    if head is not None:
        return await _judged(context, head, pairs, instruction, options, origin)
    if instruction is not None:
        raise InvalidRequest(
            f"instruction is given, model {context.model.name!r} is no reranker: leave it out", "instruction"
        )
    return await _compared(context, pairs, options, origin)


async def _judged(
    context: GatewayContext,
    head: RerankHead,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    options: RequestOptions,
    origin: Origin,
) -> Scored:
    jobs: list[Job] = []
    reading, options = PromptOptions(add_special_tokens=False), replace(options, pooling="score")
    for place, (query, document) in enumerate(pairs):
        ids = await context.prompts.encode(head.prompt(query, document, instruction), f"documents[{place}]", reading)
        jobs.append(Job(ids, PARAMS, options=options))
    results = await VectorRunner(context, jobs, origin).run()
    return Scored([probability(result.vector) for result in results], count(results))


async def _compared(
    context: GatewayContext, pairs: Sequence[tuple[str, str]], options: RequestOptions, origin: Origin
) -> Scored:
    """Each text is run once, in however many pairs it is."""
    card = context.model.card
    places: dict[str, int] = {}
    jobs: list[Job] = []
    options = replace(options, pooling=card.pooling)
    for at, pair in enumerate(pairs):
        for name, text in zip(("queries", "documents"), pair, strict=True):
            text = card.prompt("query" if name == "queries" else "document") + text
            if places.setdefault(text, len(jobs)) == len(jobs):
                jobs.append(Job(await context.prompts.encode(text, f"{name}[{at}]"), PARAMS, options=options))
    results = await VectorRunner(context, jobs, origin).run()
    vectors = [embedding(result.vector) for result in results]
    before = card.prompt("query"), card.prompt("document")
    found = [cosine(vectors[places[before[0] + query]], vectors[places[before[1] + text]]) for query, text in pairs]
    return Scored(found, count(results))
