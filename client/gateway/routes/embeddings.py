"""Embeddings (OpenAI's, Ollama's and llama-server's), scores (vLLM's) and reranking (Cohere's and Jina's)."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.admission.admission import caller_error
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.embeddings.embed import EmbedCall, Embedded, embed
from allspan.client.gateway.embeddings.schemas import (
    EmbeddingRequest,
    LlamaEmbedRequest,
    OllamaEmbedRequest,
    OllamaPromptRequest,
    RerankRequest,
    ScoreRequest,
)
from allspan.client.gateway.embeddings.score import Scored, score
from allspan.client.gateway.http.body import read_json_body
from allspan.client.gateway.http.endpoint import Endpoint
from allspan.client.gateway.http.sse import while_connected
from allspan.client.gateway.openai.answer_schemas import COUNT, TEXT, list_of, object_of
from allspan.client.gateway.openai.schemas import RequestBody, parse
from allspan.client.gateway.telemetry.request_context import Origin, origin_of
from allspan.protos.embeddings.vectors import ranked, to_base64

Json = dict[str, Any]
Work = Callable[[bytes, Origin], Awaitable[Any]]

_NUMBER: Json = {"type": "number"}
_USAGE = object_of(prompt_tokens=COUNT, total_tokens=COUNT)
_VECTOR: Json = {"type": ["array", "string"], "items": _NUMBER}
_VECTORS = object_of(
    object={"const": "list"},
    data=list_of(object_of(object={"const": "embedding"}, index=COUNT, embedding=_VECTOR)),
    model=TEXT,
    usage=_USAGE,
)
_SCORES = object_of(
    id=TEXT,
    object={"const": "list"},
    model=TEXT,
    data=list_of(object_of(index=COUNT, object={"const": "score"}, score=_NUMBER)),
    usage=_USAGE,
)
_RANKED = object_of(id=TEXT, model=TEXT, results=list_of(object_of(index=COUNT, relevance_score=_NUMBER)), usage=_USAGE)
_OLLAMA_VECTORS = object_of(model=TEXT, embeddings=list_of(list_of(_NUMBER)), prompt_eval_count=COUNT)
_LLAMA_VECTORS = list_of(object_of(index=COUNT, embedding=list_of(list_of(_NUMBER))))


class _Answers:
    """Reads, checks, runs and answers requests for vectors."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._limits = context.config.limits

    async def answer(self, request: Request, work: Work, any_type: bool = False) -> Response:
        """The JSON of what `work` makes of the body; it is cancelled when the client goes away."""
        origin = origin_of(request)
        try:
            body = await read_json_body(request, self._limits, any_type)
            told = await while_connected(request.receive, _awaited(work(body, origin)))
            return await asyncio.to_thread(JSONResponse, told)
        except Exception as error:
            raise caller_error(error, origin.label) from error

    async def embeddings(self, body: bytes, origin: Origin) -> Json:
        asked = parse(EmbeddingRequest, body, self._limits)
        made = await self._embed(asked.model, asked.call(self._limits), origin)
        is_text = asked.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": i, "embedding": to_base64(vector) if is_text else vector.tolist()}
            for i, vector in enumerate(made.vectors)
        ]
        name = self._name(asked)
        return {"object": "list", "data": data, "model": name, "usage": _usage(made.num_tokens)}

    async def ollama(self, body: bytes, origin: Origin) -> Json:
        began = time.perf_counter_ns()
        asked = parse(OllamaEmbedRequest, body, self._limits)
        made = await self._embed(asked.model, asked.call(self._limits), origin)
        return {
            "model": asked.model or self._context.model.name,
            "embeddings": [vector.tolist() for vector in made.vectors],
            "total_duration": time.perf_counter_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": made.num_tokens,
        }

    async def ollama_prompt(self, body: bytes, origin: Origin) -> Json:
        asked = parse(OllamaPromptRequest, body, self._limits)
        made = await self._embed(asked.model, asked.call(), origin)
        return {"embedding": made.vectors[0].tolist()}

    async def llama(self, body: bytes, origin: Origin) -> list[Json]:
        asked = parse(LlamaEmbedRequest, body, self._limits)
        made = await self._embed(asked.model, asked.call(self._limits), origin)
        return [{"index": i, "embedding": [vector.tolist()]} for i, vector in enumerate(made.vectors)]

    async def scores(self, body: bytes, origin: Origin) -> Json:
        asked = parse(ScoreRequest, body, self._limits)
        made = await self._score(asked, asked.pairs(self._limits), origin)
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(made.scores)]
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self._name(asked),
            "data": data,
            "usage": _usage(made.num_tokens),
        }

    async def rerank(self, body: bytes, origin: Origin) -> Json:
        asked = parse(RerankRequest, body, self._limits)
        pairs = asked.pairs(self._limits)
        made = await self._score(asked, pairs, origin)
        results: list[Json] = []
        for place, value in ranked(made.scores, asked.top_n):
            results.append({"index": place, "relevance_score": value})
            if asked.return_documents is not False:
                results[-1]["document"] = {"text": pairs[place][1]}
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": self._name(asked),
            "results": results,
            "usage": _usage(made.num_tokens),
        }

    async def _embed(self, model: str, call: EmbedCall, origin: Origin) -> Embedded:
        call = replace(call, options=self._context.model.with_adapter(call.options, model))
        return await embed(self._context, call, origin)

    async def _score(
        self, asked: ScoreRequest | RerankRequest, pairs: Sequence[tuple[str, str]], origin: Origin
    ) -> Scored:
        options = self._context.model.with_adapter(asked.options(), asked.model)
        return await score(self._context, pairs, asked.instruction, options, origin)

    def _name(self, asked: RequestBody) -> str:
        """The name that the answer has."""
        model = self._context.model
        return model.adapter(asked.model) or model.name


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoints whose results are vectors or scores."""
    answers = _Answers(context)

    async def embeddings(request: Request) -> Response:
        return await answers.answer(request, answers.embeddings)

    async def scores(request: Request) -> Response:
        return await answers.answer(request, answers.scores)

    async def rerank(request: Request) -> Response:
        return await answers.answer(request, answers.rerank)

    async def ollama(request: Request) -> Response:
        return await answers.answer(request, answers.ollama, any_type=True)

    async def ollama_prompt(request: Request) -> Response:
        return await answers.answer(request, answers.ollama_prompt, any_type=True)

    async def llama(request: Request) -> Response:
        return await answers.answer(request, answers.llama, any_type=True)

    made = [
        Endpoint(
            *("POST", "/v1/embeddings", embeddings, "Gives vectors of texts or token ids."),
            body=EmbeddingRequest,
            required=("input",),
            answer=_VECTORS,
        ),
        Endpoint(
            *("POST", "/api/embed", ollama, "Gives vectors of texts, as Ollama does."),
            body=OllamaEmbedRequest,
            answer=_OLLAMA_VECTORS,
        ),
        Endpoint(
            *("POST", "/api/embeddings", ollama_prompt, "Gives the vector of a text, as Ollama once did."),
            body=OllamaPromptRequest,
            answer=object_of(embedding=list_of(_NUMBER)),
        ),
    ]
    for path in ("/embedding", "/embeddings"):
        summary = "Gives vectors of texts, as llama-server does."
        made.append(Endpoint("POST", path, llama, summary, body=LlamaEmbedRequest, answer=_LLAMA_VECTORS))
    for path in ("/v1/score", "/score"):
        summary = "Says how well documents fit queries."
        made.append(Endpoint("POST", path, scores, summary, body=ScoreRequest, answer=_SCORES))
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        summary = "Puts the documents that fit a query best first."
        needs = ("query", "documents")
        made.append(Endpoint("POST", path, rerank, summary, body=RerankRequest, required=needs, answer=_RANKED))
    return made


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


def _usage(num_tokens: int) -> Json:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
