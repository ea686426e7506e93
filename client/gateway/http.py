"""The HTTP side: OpenAI's endpoints, health and version, as one FastAPI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from allspan import __version__
from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.generation import Generation, interleave
from allspan.client.gateway.http_errors import HttpError, body_of, response_of, status_of
from allspan.client.gateway.openai_chat import plan_chat
from allspan.client.gateway.openai_completions import plan_completion
from allspan.client.gateway.openai_shapes import Endpoint, Gathered, Json, Plan, usage
from allspan.client.gateway.request_id import RequestIds
from allspan.client.gateway.sse import DONE, EventStream, event, while_connected
from allspan.client.gateway.submit import Submitter, caller_error
from allspan.protos.errors import AllspanError, RequestCancelled, Unavailable

UNREAD_S = 2.0
"""How long the rest of a body that is too large is still taken in, so that its sender comes to read the answer."""

logger = logging.getLogger("allspan.gateway")


def make_app(submitter: Submitter, config: GatewayConfig) -> FastAPI:
    """All routes over one submitter."""
    app = FastAPI(title="allspan", version=__version__, docs_url=None, redoc_url=None)
    openai = OpenAI(submitter, config)
    app.add_api_route("/v1/models", openai.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", openai.one_model, methods=["GET"])
    app.add_api_route("/v1/completions", openai.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", openai.chat, methods=["POST"])

    async def health() -> Response:
        return JSONResponse({"status": "alive"})

    async def ready() -> Response:
        if submitter.is_ready:
            return JSONResponse({"status": "ready"})
        return response_of(Unavailable(submitter.down_cause or "the engine is not ready"))

    async def version() -> Response:
        return JSONResponse({"version": __version__})

    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/ready", ready, methods=["GET"])
    app.add_api_route("/version", version, methods=["GET"])
    app.add_exception_handler(AllspanError, _refused)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_middleware(RequestIds)
    return app


class OpenAI:
    """The handlers under /v1."""

    def __init__(self, submitter: Submitter, config: GatewayConfig) -> None:
        self._submitter = submitter
        self._max_body_bytes = config.max_body_bytes
        self._body_timeout = config.body_timeout

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, name: str) -> Response:
        self._submitter.check_model(name)
        return JSONResponse(self._card())

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, plan_completion)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, plan_chat)

    def _card(self) -> Json:
        model = self._submitter.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "allspan",
            "max_model_len": model.max_model_len,
        }

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        label = f"{request.method} {request.url.path}"
        try:
            plan = await endpoint(self._submitter, await self._body(request))
            if not plan.stream:
                return JSONResponse(await while_connected(request.receive, self._whole(plan, label)))
            generations = await while_connected(request.receive, self._submitter.start(plan.jobs, label))
        except Exception as error:
            raise caller_error(error, label) from error
        return EventStream(self._events(plan, generations), lambda: self._submitter.end(generations))

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise HttpError(415, f"Content-Type is {kind[:64]!r}, must be application/json")
        limit = self._max_body_bytes
        length = request.headers.get("content-length", "")
        too_large = length.isdecimal() and int(length) > limit
        body = bytearray()
        chunks = request.stream()
        try:
            async with asyncio.timeout(self._body_timeout):
                while not too_large and (chunk := await anext(chunks, None)) is not None:
                    body += chunk
                    too_large = len(body) > limit
            if too_large:
                await _discard(chunks, 4 * limit)
                raise HttpError(413, f"the body is larger than {limit} bytes, the limit of this server")
        except TimeoutError:
            raise HttpError(408, f"the body did not arrive within {self._body_timeout:g} s") from None
        except ClientDisconnect:
            raise RequestCancelled("the client went away") from None
        return bytes(body)

    async def _whole(self, plan: Plan, label: str) -> Json:
        async with self._submitter.running(plan.jobs, label) as generations:
            gathered = [Gathered() for _ in generations]
            async with aclosing(interleave(generations)) as deltas:
                async for place, delta in deltas:
                    gathered[place].add(delta)
            for choice, generation in zip(gathered, generations, strict=True):
                choice.prompt_logprobs = generation.prompt_logprobs
            choices = [plan.shape.choice(index, choice) for index, choice in enumerate(gathered)]
            return {
                "id": plan.shape.id_prefix + generations[0].handle.request_id,
                "object": plan.shape.object,
                "created": int(time.time()),
                "model": self._submitter.model.name,
                "choices": choices,
                "usage": usage(generations, plan.choices),
                "system_fingerprint": None,
                **plan.shape.extras(gathered),
            }

    async def _events(self, plan: Plan, generations: list[Generation]) -> AsyncGenerator[bytes, None]:
        envelope = {
            "id": plan.shape.id_prefix + generations[0].handle.request_id,
            "object": plan.shape.chunk_object,
            "created": int(time.time()),
            "model": self._submitter.model.name,
            "system_fingerprint": None,
        }
        extra = {"usage": None} if plan.include_usage else {}
        try:
            for index in range(len(generations)):
                for choice in plan.shape.opening(index):
                    yield event({**envelope, "choices": [choice], **extra})
            async with aclosing(interleave(generations)) as deltas:
                async for place, delta in deltas:
                    for choice in plan.shape.pieces(place, delta):
                        yield event({**envelope, "choices": [choice], **extra})
        except Exception as error:
            shown = caller_error(error, "streaming")
            logger.info("stream %s broke off: %s", envelope["id"], shown.message)
            yield event(body_of(shown))
            return
        if plan.include_usage:
            yield event({**envelope, "choices": [], "usage": usage(generations, plan.choices)})
        yield DONE


async def _discard(chunks: AsyncGenerator[bytes, None], limit: int) -> None:
    """Reads on for a while without keeping anything: a connection that is closed on its sender loses the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(UNREAD_S):
            while limit > 0 and (chunk := await anext(chunks, None)) is not None:
                limit -= len(chunk)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, AllspanError)
    if not isinstance(error, RequestCancelled):
        logger.info("refused %s %s with %d: %s", request.method, request.url.path, status_of(error), error.message)
    return response_of(error)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    messages = {404: f"{what}: no such endpoint", 405: f"{what}: this endpoint does not take {request.method}"}
    response = response_of(HttpError(error.status_code, messages.get(error.status_code, f"{what}: {error.detail}")))
    response.headers.update(error.headers or {})
    return response
