"""Checks the requests of Ollama's clients; nothing runs yet."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from allspan.client.gateway.chat.reader import Reading
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.ollama.request import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from allspan.client.gateway.ollama.turn import NDJSON, OllamaTurn, stamped
from allspan.client.gateway.openai.chat import chat_job
from allspan.client.gateway.openai.chat_request import ChatRequest
from allspan.client.gateway.openai.completions import completion_plan
from allspan.client.gateway.openai.schemas import CompletionRequest, parse, parse_value

Json = dict[str, Any]


async def plan_chat(context: GatewayContext, body: bytes) -> OllamaTurn | Response:
    """POST /api/chat."""
    limits = context.config.limits
    request = parse(OllamaChatRequest, body, limits)
    context.model.check_name(request.model)
    fields, most = request.sampling(limits.strict)
    if not request.messages:
        return _loaded(context, request, {"message": {"role": "assistant", "content": ""}})
    chat = parse_value(ChatRequest, request.conversation() | fields | {"model": request.model}, limits)
    job, reading = await chat_job(context, chat, most)
    return OllamaTurn(job, reading, request.model or context.model.name, request.is_streamed, is_chat=True)


async def plan_generate(context: GatewayContext, body: bytes) -> OllamaTurn | Response:
    """POST /api/generate. Without a chat template, or with `raw`, the prompt is continued as it is."""
    limits = context.config.limits
    request = parse(OllamaGenerateRequest, body, limits)
    context.model.check_name(request.model)
    fields, most = request.sampling(limits.strict)
    fields["model"] = request.model
    request.refuse()
    if not request.prompt:
        return _loaded(context, request, {"response": ""})
    if request.raw or not context.tokenizer.has_chat_template:
        completion = parse_value(CompletionRequest, fields | {"prompt": request.prompt}, limits)
        job, reading = (await completion_plan(context, completion, most)).jobs[0], Reading()
    else:
        chat = parse_value(ChatRequest, request.conversation() | fields, limits)
        job, reading = await chat_job(context, chat, most)
    return OllamaTurn(job, reading, request.model or context.model.name, request.is_streamed, is_chat=False)


def _loaded(context: GatewayContext, request: OllamaRequest, content: Json) -> Response:
    """The answer to a request that only has the model loaded, which it is."""
    fields = stamped(request.model or context.model.name) | content | {"done": True, "done_reason": "load"}
    return JSONResponse(fields, media_type=NDJSON if request.is_streamed else "application/json")
