"""llama-server's own endpoints: /completion, /props, /slots."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from allspan import __version__
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Endpoint
from allspan.client.gateway.http.turns import TurnAnswers
from allspan.client.gateway.llama_server.request import LlamaRequest, in_our_words
from allspan.client.gateway.llama_server.turn import plan_completion, settings
from allspan.client.gateway.openai.answer_schemas import COUNT, EVENTS, TEXT, object_of
from allspan.protos.api.errors import Unavailable


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoints of llama-server's API that no other API here has."""
    answers = TurnAnswers(context, in_our_words, any_type=True)
    most = context.config.limits.max_concurrent_requests

    async def completion(request: Request) -> Response:
        return await answers.answer(request, plan_completion)

    async def props() -> Response:
        tokenizer, n_ctx = context.tokenizer, context.model.max_model_len
        template = tokenizer.chat_template
        params = settings(context.sampling.params({}, 0, None)) | {"n_predict": -1}
        return JSONResponse(
            {
                "default_generation_settings": {"id": 0, "n_ctx": n_ctx, "is_processing": False, "params": params},
                "total_slots": most,
                "model_alias": context.model.name,
                "model_path": context.model.root,
                "chat_template": template.published if template is not None else "",
                "bos_token": _text(context, tokenizer.bos_token_id),
                "eos_token": _text(context, next(iter(tokenizer.eos_token_ids), None)),
                "modalities": {"vision": False, "audio": False},
                "build_info": f"allspan-{__version__}",
            }
        )

    async def slots(request: Request) -> Response:
        """A slot for each running request, and one that is free unless the server is full."""
        busy = context.admission.running_requests()
        is_full = len(busy) >= most
        if is_full and request.query_params.get("fail_on_no_slot"):
            raise Unavailable("no slot is free; try again later")
        decoded = [request.num_output_tokens for request in busy] + ([] if is_full else [0])
        return JSONResponse(
            [
                {
                    "id": place,
                    "n_ctx": context.model.max_model_len,
                    "speculative": False,
                    "is_processing": place < len(busy),
                    "next_token": {"n_decoded": count},
                }
                for place, count in enumerate(decoded)
            ]
        )

    answer = object_of(content=TEXT, tokens_predicted=COUNT, tokens_evaluated=COUNT, stop={"type": "boolean"})
    return [
        Endpoint(
            *("POST", "/completion", completion, "Continues a prompt, as llama-server does."),
            body=LlamaRequest,
            required=("prompt",),
            answer=answer,
            media_types=EVENTS,
        ),
        Endpoint("GET", "/props", props, "Describes the server for llama-server's clients."),
        Endpoint("GET", "/slots", slots, "Lists the running requests for llama-server's clients."),
    ]


def _text(context: GatewayContext, token_id: int | None) -> str:
    return "" if token_id is None else context.tokenizer.codec.piece(token_id).decode("utf-8", "replace")
