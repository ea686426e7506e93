"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's shapes: what a prompt's tokens are, how many."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.admission.admission import caller_error
from allspan.client.gateway.admission.prompts import PromptOptions
from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.body import read_json_body
from allspan.client.gateway.http.endpoint import Endpoint
from allspan.client.gateway.offload import off_loop
from allspan.client.gateway.openai.answer_schemas import COUNT, OR_NULL, TEXT, list_of, object_of
from allspan.client.gateway.openai.chat_request import ChatRequest, read_chat
from allspan.client.gateway.openai.schemas import RequestBody, parse, parse_value
from allspan.client.gateway.openai.shapes import TokenTexts
from allspan.client.gateway.telemetry.request_context import origin_of
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.text import Tokenizer

_OF_CHAT = (
    "messages",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)


class TokenizeRequest(RequestBody):
    """A text, or a conversation for the chat template. `content` is llama-server's name of `prompt`."""

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    # as chat has them
    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, limits: LimitsConfig) -> None:
        super().check(limits)
        if self.content is not None and self.prompt is None:
            self.prompt = self.content
        if (self.prompt is None) == (self.messages is None):
            given = "both are given" if self.messages is not None else "neither is given"
            raise InvalidRequest(f"prompt and messages: {given}, must be one of them", "prompt")


class DetokenizeRequest(RequestBody):
    """Token ids. Special tokens are part of the text unless `skip_special_tokens` is true."""

    tokens: list[int]
    skip_special_tokens: bool | None = None


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoints of tokenizing and detokenizing."""
    limits = context.config.limits

    async def tokenize(request: Request) -> Response:
        with _answered(request):
            asked = parse(TokenizeRequest, await read_json_body(request, limits), limits)
            context.model.check_name(asked.model)
            options = PromptOptions(asked.add_special_tokens, asked.parse_special is not False, only_counted=True)
            if asked.prompt is not None:
                ids = await context.prompts.encode(asked.prompt, "prompt", options)
            else:
                given = {name: getattr(asked, name) for name in _OF_CHAT}
                chat = read_chat(parse_value(ChatRequest, given, limits), context.prompts.chat)
                ids = await context.prompts.encode_chat(chat.messages, options, chat.rendering)
            text = TokenTexts(context.tokenizer).text
            strings = await off_loop(len(ids), lambda: list(map(text, ids))) if asked.return_token_strs else None
            return JSONResponse(
                {
                    "count": len(ids),
                    "max_model_len": context.model.max_model_len,
                    "tokens": list(ids),
                    "token_strs": strings,
                }
            )

    async def detokenize(request: Request) -> Response:
        with _answered(request):
            asked = parse(DetokenizeRequest, await read_json_body(request, limits), limits)
            context.model.check_name(asked.model)
            ids = await context.prompts.encode(asked.tokens, "tokens", PromptOptions(only_counted=True))
            decode, skip = context.tokenizer.decode, bool(asked.skip_special_tokens)
            return JSONResponse({"prompt": await off_loop(len(ids), lambda: decode(ids, skip))})

    async def tokenizer_info() -> Response:
        """Returns the facts that a client needs to render and count by itself, as evaluation harnesses do."""
        return JSONResponse(_described(context.tokenizer))

    return [
        Endpoint(
            *("POST", "/tokenize", tokenize, "Gives the token ids of a text or a conversation."),
            body=TokenizeRequest,
            answer=object_of(count=COUNT, max_model_len=COUNT, tokens=list_of(COUNT)),
        ),
        Endpoint(
            *("POST", "/detokenize", detokenize, "Gives the text of token ids."),
            body=DetokenizeRequest,
            answer=object_of(prompt=TEXT),
        ),
        Endpoint(
            *("GET", "/tokenizer_info", tokenizer_info, "Describes the tokenizer."),
            answer=object_of(vocab_size=COUNT, bos_token=OR_NULL, eos_token=OR_NULL),
        ),
    ]


def _described(tokenizer: Tokenizer) -> dict[str, Any]:
    def text(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.codec.piece(token_id).decode("utf-8", "replace")

    return {
        "tokenizer_class": type(tokenizer.codec).__name__,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": text(tokenizer.bos_token_id),
        "eos_token": text(tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None),
        "add_bos_token": bool(tokenizer.prefix),
        "chat_template": tokenizer.chat_template.published if tokenizer.chat_template else None,
    }


@contextlib.contextmanager
def _answered(request: Request) -> Iterator[None]:
    """A bug reaches its caller as an incident."""
    try:
        yield
    except Exception as error:
        raise caller_error(error, origin_of(request).label) from error
