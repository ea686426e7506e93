"""OpenAI's endpoints: models, completions, chat completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.openai.answers import Answers
from allspan.client.gateway.openai.chat import plan_chat
from allspan.client.gateway.openai.completions import plan_completion
from allspan.client.gateway.openai.shapes import Json


def routes(context: GatewayContext) -> APIRouter:
    router = APIRouter(prefix="/v1")
    answers = Answers(context)

    def card() -> Json:
        model = context.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "allspan",
            "root": model.root,
            "parent": None,
            "max_model_len": model.max_model_len,
        }

    @router.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> Response:
        context.model.check_name(name)
        return JSONResponse(card())

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        return await answers.answer(request, plan_completion)

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await answers.answer(request, plan_chat)

    return router
