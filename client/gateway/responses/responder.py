"""Answers a request's body, whole or as a stream of typed events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.admission.active_request import ActiveRequest
from allspan.client.gateway.admission.admission import caller_error
from allspan.client.gateway.auth.caller import current_caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.body import read_json_body
from allspan.client.gateway.http.sse import EventStream, event, while_connected
from allspan.client.gateway.openai.chat import chat_job
from allspan.client.gateway.openai.chat_request import ChatRequest
from allspan.client.gateway.openai.renamed import renamed
from allspan.client.gateway.openai.schemas import parse, parse_value
from allspan.client.gateway.openai.shapes import Json, TokenTexts
from allspan.client.gateway.responses.items import read_items, to_messages
from allspan.client.gateway.responses.request import ResponsesRequest
from allspan.client.gateway.responses.store import ResponseStore, StoredResponse
from allspan.client.gateway.responses.turn import ResponseTurn
from allspan.client.gateway.telemetry.request_context import Origin, origin_of
from allspan.protos.api.errors import InvalidRequest

logger = logging.getLogger("allspan.gateway")

# Fields of the conversation that has the answer → as this endpoint's callers know them.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
_PARTS = {".function.": ".", "text.format.json_schema": "text.format"}


class Responder:
    """Answers POST /v1/responses, and keeps the answers in `store`."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._limits = context.config.limits
        settings = context.config.responses
        self.store = ResponseStore(settings.max_stored_responses, settings.stored_response_ttl)

    async def answer(self, request: Request) -> Response:
        """Reads, checks, runs and answers one request."""
        origin = origin_of(request)
        try:
            turn = await self._plan(await read_json_body(request, self._limits))
            return await self._run(request, turn, origin)
        except Exception as error:
            raise caller_error(error, origin.label) from error

    async def _run(self, request: Request, turn: ResponseTurn, origin: Origin) -> Response:
        try:
            if not turn.request.stream:
                return JSONResponse(await while_connected(request.receive, self._whole(turn, origin)))
            generations = await while_connected(request.receive, self._context.admission.start([turn.job], origin))
        except InvalidRequest as error:
            raise renamed(error, _NAMES, _PARTS) from error
        return EventStream(
            self._events(turn, generations[0], origin.owner), lambda: self._context.admission.end(generations)
        )

    async def count(self, request: Request) -> int:
        """Returns the number of prompt tokens that the request would have."""
        try:
            turn = await self._plan(await read_json_body(request, self._limits))
        except Exception as error:
            raise caller_error(error, origin_of(request).label) from error
        return len(turn.job.token_ids)

    async def _plan(self, body: bytes) -> ResponseTurn:
        """Checks everything; nothing runs yet."""
        request = parse(ResponsesRequest, body, self._limits)
        self._context.model.check_name(request.model)
        items = read_items(request.input)
        before: list[Json] = []
        if request.previous_response_id is not None:
            before = self.store.history(current_caller().owner, request.previous_response_id)
        chat_body = request.conversation(to_messages([*before, *items], request.instructions))
        try:
            chat = parse_value(ChatRequest, chat_body, self._limits)
            job, reading = await chat_job(self._context, chat)
        except InvalidRequest as error:
            raise renamed(error, _NAMES, _PARTS) from error
        texts = TokenTexts(self._context.tokenizer, bool(chat.return_tokens_as_token_ids))
        return ResponseTurn(request, job, reading, texts, self._context.model.answered(job.options), items, before)

    async def _whole(self, turn: ResponseTurn, origin: Origin) -> Json:
        async with self._context.admission.running([turn.job], origin) as (generation,):
            turn.begin(generation)
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    for _ in turn.push(delta, generation):
                        pass
            self._keep(turn, origin.owner)
            return turn.response

    async def _events(self, turn: ResponseTurn, generation: ActiveRequest, owner: str) -> AsyncGenerator[bytes, None]:
        try:
            for told in turn.begin(generation):
                yield event(told, told["type"])
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    for told in turn.push(delta, generation):
                        if told["type"] in ("response.completed", "response.incomplete"):
                            self._keep(turn, owner)  # before its caller can ask for it
                        yield event(told, told["type"])
        except Exception as error:
            shown = caller_error(error, "streaming")
            logger.info("stream %s broke off: %s", turn.response.get("id"), shown.message)
            for told in turn.fail(shown, generation):
                yield event(told, told["type"])
            self._keep(turn, owner)

    def _keep(self, turn: ResponseTurn, owner: str) -> None:
        if turn.is_kept:
            self.store.put(owner, StoredResponse(turn.response, turn.input, turn.history))
