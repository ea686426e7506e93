"""Ollama's API: chat, generate, and what its clients ask about models."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.body import read_json_body
from allspan.client.gateway.http.endpoint import Endpoint
from allspan.client.gateway.http.turns import TurnAnswers
from allspan.client.gateway.ollama.models import ModelCards
from allspan.client.gateway.ollama.plans import plan_chat, plan_generate
from allspan.client.gateway.ollama.request import OllamaChatRequest, OllamaGenerateRequest, in_our_words
from allspan.client.gateway.ollama.turn import NDJSON
from allspan.client.gateway.openai.answer_schemas import COUNT, TEXT, list_of, object_of
from allspan.client.gateway.openai.schemas import RequestBody, parse

VERSION = "0.12.6"
"""The version of Ollama whose API is answered here; clients ask for it to know what they may send."""
_DONE: dict[str, Any] = {"type": "boolean"}
_MODELS = object_of(models=list_of(object_of(name=TEXT, model=TEXT, size=COUNT, digest=TEXT)))


class ShowRequest(RequestBody):
    """POST /api/show. `name` is the older name of `model`."""

    name: str | None = None
    verbose: bool | None = None
    system: str | None = None
    options: dict[str, Any] | None = None


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoints of Ollama's API."""
    answers = TurnAnswers(context, in_our_words, any_type=True)
    cards = ModelCards(context)

    async def chat(request: Request) -> Response:
        return await answers.answer(request, plan_chat)

    async def generate(request: Request) -> Response:
        return await answers.answer(request, plan_generate)

    async def tags() -> Response:
        return JSONResponse(await asyncio.to_thread(cards.tags))

    async def running() -> Response:
        return JSONResponse(await asyncio.to_thread(cards.running))

    async def show(request: Request) -> Response:
        limits = context.config.limits
        asked = parse(ShowRequest, await read_json_body(request, limits, any_type=True), limits)
        name = asked.model or asked.name or ""
        context.model.check_name(name)
        return JSONResponse(await asyncio.to_thread(cards.shown, name))

    async def version() -> Response:
        return JSONResponse({"version": VERSION})

    return [
        Endpoint(
            *("POST", "/api/chat", chat, "Answers a conversation, as Ollama does."),
            body=OllamaChatRequest,
            answer=object_of(model=TEXT, created_at=TEXT, message=object_of(role=TEXT, content=TEXT), done=_DONE),
            media_types=(NDJSON,),
        ),
        Endpoint(
            *("POST", "/api/generate", generate, "Answers a prompt, as Ollama does."),
            body=OllamaGenerateRequest,
            answer=object_of(model=TEXT, created_at=TEXT, response=TEXT, done=_DONE),
            media_types=(NDJSON,),
        ),
        Endpoint("GET", "/api/tags", tags, "Lists the names of the model for Ollama's clients.", answer=_MODELS),
        Endpoint("GET", "/api/ps", running, "Lists the loaded model for Ollama's clients.", answer=_MODELS),
        Endpoint(
            *("POST", "/api/show", show, "Describes the model for Ollama's clients."),
            body=ShowRequest,
            answer=object_of(template=TEXT, capabilities=list_of(TEXT)),
        ),
        Endpoint(
            *("GET", "/api/version", version, "Gives the version of Ollama whose API is answered."),
            answer=object_of(version=TEXT),
        ),
    ]
