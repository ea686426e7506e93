"""Answers a checked plan, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.admission.active_request import ActiveRequest, interleave
from allspan.client.gateway.admission.admission import caller_error
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.body import read_json_body
from allspan.client.gateway.http.errors import body_of
from allspan.client.gateway.http.sse import DONE, ChunkWriter, EventStream, event, while_connected
from allspan.client.gateway.openai.shapes import Endpoint, Gathered, Json, Plan, usage
from allspan.client.gateway.telemetry.request_context import Origin, origin_of

INLINE_LOGPROBS = 2048
"""Number of log-probabilities above which they are written as JSON on a thread, so that other streams continue."""

logger = logging.getLogger("allspan.gateway")


class Answers:
    """Makes the answers of the endpoints whose choices stand in an envelope."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._limits = context.config.limits

    async def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """Reads, checks, runs and answers one request."""
        origin = origin_of(request)
        try:
            plan = await endpoint(self._context, await read_json_body(request, self._limits))
            if not plan.stream:
                return await while_connected(request.receive, self._whole(plan, origin))
            generations = await while_connected(request.receive, self._context.admission.start(plan.jobs, origin))
        except Exception as error:
            raise caller_error(error, origin.label) from error
        return EventStream(self._events(plan, generations), lambda: self._context.admission.end(generations))

    async def _whole(self, plan: Plan, origin: Origin) -> Response:
        async with self._context.admission.running(plan.jobs, origin) as generations:
            gathered = [Gathered() for _ in generations]
            async with aclosing(interleave(generations)) as deltas:
                async for place, delta in deltas:
                    gathered[place].add(delta)
            for choice, generation in zip(gathered, generations, strict=True):
                choice.prompt_logprobs = generation.prompt_logprobs
            count = sum(len(choice.logprobs) + len(choice.prompt_logprobs) for choice in gathered)
            if count <= INLINE_LOGPROBS:
                return self._written(plan, generations, gathered)
            return await asyncio.to_thread(self._written, plan, generations, gathered)

    def _written(self, plan: Plan, generations: Sequence[ActiveRequest], gathered: Sequence[Gathered]) -> Response:
        chosen = [gathered[place] for place in plan.chosen(gathered)]
        return JSONResponse(
            {
                "id": plan.shape.id_prefix + generations[0].handle.request_id,
                "object": plan.shape.object,
                "created": int(time.time()),
                "model": self._context.model.answered(plan.jobs[0].options),
                "choices": [plan.shape.choice(index, choice) for index, choice in enumerate(chosen)],
                "usage": usage(generations, plan.jobs_per_prompt) | plan.shape.usage_details(),
                "system_fingerprint": self._context.model.fingerprint,
                **plan.shape.envelope,
                **plan.shape.extras(gathered),
            }
        )

    async def _events(self, plan: Plan, generations: list[ActiveRequest]) -> AsyncGenerator[bytes, None]:
        envelope = {
            "id": plan.shape.id_prefix + generations[0].handle.request_id,
            "object": plan.shape.chunk_object,
            "created": int(time.time()),
            "model": self._context.model.answered(plan.jobs[0].options),
            "system_fingerprint": self._context.model.fingerprint,
            **plan.shape.envelope,
        }

        def used() -> Json:
            return usage(generations, plan.jobs_per_prompt) | plan.shape.usage_details()

        writer = ChunkWriter(envelope, {"usage": None} if plan.include_usage else {})
        try:
            for index, generation in enumerate(generations):
                for choice in plan.shape.opening(index, generation):
                    yield writer.chunk(choice)
            async with aclosing(interleave(generations)) as deltas:
                async for place, delta in deltas:
                    for choice in plan.shape.pieces(place, delta):
                        yield writer.chunk(choice, {"usage": used()} if plan.continuous_usage else None)
        except Exception as error:
            shown = caller_error(error, "streaming")
            logger.info("stream %s broke off: %s", envelope["id"], shown.message)
            yield event(body_of(shown))
            return
        if plan.include_usage:
            yield event({**envelope, "choices": [], "usage": used()})
        yield DONE
