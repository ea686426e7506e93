"""OpenAI's Responses: POST /v1/responses, and what is kept of them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.auth.caller import current_caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.endpoint import Endpoint
from allspan.client.gateway.http.errors import HttpError
from allspan.client.gateway.openai.answer_schemas import COUNT, EVENTS, RESPONSE, TEXT, list_of, object_of
from allspan.client.gateway.responses.request import ResponsesRequest
from allspan.client.gateway.responses.responder import Responder

_COUNTED = object_of(object={"const": "response.input_tokens"}, input_tokens=COUNT)
_ITEMS = object_of(object={"const": "list"}, data=list_of(object_of(id=TEXT)))
_DELETED = object_of(id=TEXT, object={"const": "response"}, deleted={"const": True})
_CANCELLED = object_of(id=TEXT, status={"const": "cancelled"})


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoints of /v1/responses."""
    responder = Responder(context)
    store = responder.store

    async def create(request: Request) -> Response:
        return await responder.answer(request)

    async def count(request: Request) -> Response:
        return JSONResponse({"object": "response.input_tokens", "input_tokens": await responder.count(request)})

    async def kept(response_id: str, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise HttpError(400, "stream is true: a response that is kept comes whole; stream when you ask for it")
        return JSONResponse(store.get(current_caller().owner, response_id).response)

    async def input_items(response_id: str) -> Response:
        items = list(reversed(store.get(current_caller().owner, response_id).input))
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return JSONResponse({"object": "list", "data": items, "has_more": False, **ends})

    async def forget(response_id: str) -> Response:
        store.delete(current_caller().owner, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(response_id: str) -> Response:
        """Cancels a stream that still runs; its own last event reports it."""
        caller = current_caller()
        if await context.admission.abort(response_id, caller):
            return JSONResponse({"id": response_id, "object": "response", "status": "cancelled"})
        status = store.get(caller.owner, response_id).response["status"]
        raise HttpError(400, f"response {response_id[:128]!r} is {status}: only one that still runs can be cancelled")

    one = "/v1/responses/{response_id}"
    body, required = ResponsesRequest, ("input",)
    return [
        Endpoint(
            *("POST", "/v1/responses", create, "Answers a conversation, and keeps the answer."),
            body=body,
            required=required,
            answer=RESPONSE,
            media_types=EVENTS,
        ),
        Endpoint(
            *("POST", "/v1/responses/input_tokens", count, "Counts the tokens of a conversation."),
            body=body,
            required=required,
            answer=_COUNTED,
        ),
        Endpoint("GET", one, kept, "Gives a response that is kept.", answer=RESPONSE),
        Endpoint("GET", f"{one}/input_items", input_items, "Lists what a kept response answered.", answer=_ITEMS),
        Endpoint("DELETE", one, forget, "Forgets a kept response.", answer=_DELETED),
        Endpoint("POST", f"{one}/cancel", cancel, "Ends a response that still runs.", answer=_CANCELLED),
    ]
