"""OpenAI's Responses: POST /v1/responses, and what is kept of them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.auth.caller import current_caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.errors import HttpError
from allspan.client.gateway.responses.responder import Responder


def routes(context: GatewayContext) -> APIRouter:
    router = APIRouter(prefix="/v1/responses")
    responder = Responder(context)
    store = responder.store

    @router.post("")
    async def create(request: Request) -> Response:
        return await responder.answer(request)

    @router.post("/input_tokens")
    async def count(request: Request) -> Response:
        return JSONResponse({"object": "response.input_tokens", "input_tokens": await responder.count(request)})

    @router.get("/{response_id}")
    async def kept(response_id: str, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise HttpError(400, "stream is true: a response that is kept comes whole; stream when you ask for it")
        return JSONResponse(store.get(current_caller().owner, response_id).response)

    @router.get("/{response_id}/input_items")
    async def input_items(response_id: str) -> Response:
        items = list(reversed(store.get(current_caller().owner, response_id).input))
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return JSONResponse({"object": "list", "data": items, "has_more": False, **ends})

    @router.delete("/{response_id}")
    async def forget(response_id: str) -> Response:
        store.delete(current_caller().owner, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post("/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        """Of a stream that still runs; its own last event tells of it."""
        caller = current_caller()
        if await context.admission.abort(response_id, caller):
            return JSONResponse({"id": response_id, "object": "response", "status": "cancelled"})
        status = store.get(caller.owner, response_id).response["status"]
        raise HttpError(400, f"response {response_id[:128]!r} is {status}: only one that still runs can be cancelled")

    return router
