"""OpenAI's endpoints: models, completions, chat completions."""

from __future__ import annotations

from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Endpoint
from allspan.client.gateway.openai.answer_schemas import CHAT_CHOICE, CHOICE, EVENTS, MODEL, MODELS, envelope
from allspan.client.gateway.openai.answers import Answers
from allspan.client.gateway.openai.chat import plan_chat
from allspan.client.gateway.openai.chat_request import ChatRequest
from allspan.client.gateway.openai.completions import plan_completion
from allspan.client.gateway.openai.schemas import CompletionRequest
from allspan.client.gateway.openai.shapes import Json
from allspan.client.gateway.served_model import ServedModel


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the completion endpoints of OpenAI's API."""
    answers = Answers(context)

    async def models() -> Response:
        return JSONResponse(
            {"object": "list", "data": [_card(context.model, name) for name in context.model.all_names]}
        )

    async def one_model(name: str) -> Response:
        return JSONResponse(_card(context.model, context.model.find_name(name)))

    async def completions(request: Request) -> Response:
        return await answers.answer(request, plan_completion)

    async def chat(request: Request) -> Response:
        return await answers.answer(request, plan_chat)

    return [
        Endpoint("GET", "/v1/models", models, "Lists the model that is served, and its adapters.", answer=MODELS),
        Endpoint(
            "GET",
            "/v1/models/{name:path}",
            one_model,
            "Describes the model that is served, or an adapter.",
            answer=MODEL,
        ),
        Endpoint(
            "POST",
            "/v1/completions",
            completions,
            "Continues prompts.",
            body=CompletionRequest,
            required=("prompt",),
            answer=envelope("text_completion", CHOICE),
            media_types=EVENTS,
        ),
        Endpoint(
            "POST",
            "/v1/chat/completions",
            chat,
            "Answers a conversation.",
            body=ChatRequest,
            required=("messages",),
            answer=envelope("chat.completion", CHAT_CHOICE),
            media_types=EVENTS,
        ),
    ]


def _card(model: ServedModel, name: str) -> Json:
    """One of the model's names, or one of its adapters, as OpenAI and vLLM describe models."""
    adapter = next((each for each in model.adapters if each.name == name), None)
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "allspan",
        "root": model.root if adapter is None else PurePath(adapter.path).name,
        "parent": None if adapter is None else adapter.base_model_name or model.name,
        "max_model_len": model.max_model_len,
        "capabilities": list(model.capabilities),
        "sampling_defaults": model.defaults.described(),
        "sampling_defaults_source": model.defaults.source,
    }
