"""Anthropic's Messages: POST /v1/messages, and the count of a request's tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.anthropic.request import MessagesRequest, in_our_words
from allspan.client.gateway.anthropic.turn import plan_message
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Endpoint
from allspan.client.gateway.http.turns import TurnAnswers
from allspan.client.gateway.openai.answer_schemas import COUNT, EVENTS, OR_NULL, TEXT, list_of, object_of
from allspan.client.gateway.openai.chat import count_chat
from allspan.client.gateway.openai.chat_request import ChatRequest
from allspan.client.gateway.openai.schemas import parse, parse_value

_MESSAGE = object_of(
    id=TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=TEXT,
    content=list_of(object_of(type=TEXT)),
    stop_reason=TEXT,
    stop_sequence=OR_NULL,
    usage=object_of(input_tokens=COUNT, output_tokens=COUNT, cache_read_input_tokens=COUNT),
)


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoints of Anthropic's Messages."""
    answers = TurnAnswers(context, in_our_words)

    async def messages(request: Request) -> Response:
        return await answers.answer(request, plan_message)

    async def count(request: Request) -> Response:
        return await answers.answer(request, _counted)

    return [
        Endpoint(
            *("POST", "/v1/messages", messages, "Answers a conversation, as Anthropic's API does."),
            body=MessagesRequest,
            required=("messages", "max_tokens"),
            answer=_MESSAGE,
            media_types=EVENTS,
        ),
        Endpoint(
            *("POST", "/v1/messages/count_tokens", count, "Counts the tokens of such a conversation."),
            body=MessagesRequest,
            required=("messages",),
            answer=object_of(input_tokens=COUNT),
        ),
    ]


async def _counted(context: GatewayContext, body: bytes) -> Response:
    limits = context.config.limits
    request = parse(MessagesRequest, body, limits)
    context.model.check_name(request.model)
    chat = parse_value(ChatRequest, request.conversation(), limits)
    return JSONResponse({"input_tokens": await count_chat(context, chat)})
