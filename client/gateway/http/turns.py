"""Answers requests of one output each, whole or as a stream: a protocol brings a `Turn`, which knows its events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway.admission.active_request import ActiveRequest
from allspan.client.gateway.admission.admission import Job, caller_error
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.body import read_json_body
from allspan.client.gateway.http.sse import EventStream, while_connected
from allspan.client.gateway.telemetry.request_context import Origin, origin_of
from allspan.protos.api.errors import AllspanError, InvalidRequest
from allspan.protos.text.stream.text_stream import TextDelta

Json = dict[str, Any]

logger = logging.getLogger("allspan.gateway")


class Turn(Protocol):
    """A checked request and its answer as far as it has come. `begin` it, then `push` all deltas."""

    job: Job
    is_streamed: bool
    media_type: str
    """The media type of its stream."""

    def begin(self, generation: ActiveRequest) -> Iterable[bytes]:
        """Returns the events before the first token."""

    def push(self, delta: TextDelta, generation: ActiveRequest) -> Iterable[bytes]:
        """Returns the events for one delta; for the last one, those that end the stream."""

    def fail(self, error: AllspanError) -> Iterable[bytes]:
        """Returns the events that end a stream which breaks off."""

    def whole(self, generation: ActiveRequest) -> Json:
        """Returns the whole answer, once all deltas were pushed."""


Planned = Callable[[GatewayContext, bytes], Awaitable[Turn | Response]]
"""Checks a request's body; a Response answers it at once."""


class TurnAnswers:
    """Makes the answers of the endpoints of one protocol.

    `renamed`: returns an error with the protocol's own names of fields. `any_type`: see `read_json_body`.
    """

    def __init__(
        self, context: GatewayContext, renamed: Callable[[InvalidRequest], InvalidRequest], any_type: bool = False
    ) -> None:
        self._context = context
        self._renamed = renamed
        self._any_type = any_type

    async def answer(self, request: Request, planned: Planned) -> Response:
        """Reads, checks, runs and answers one request."""
        origin = origin_of(request)
        try:
            body = await read_json_body(request, self._context.config.limits, self._any_type)
            turn = await planned(self._context, body)
            if isinstance(turn, Response):
                return turn
            if not turn.is_streamed:
                return JSONResponse(await while_connected(request.receive, self._whole(turn, origin)))
            generations = await while_connected(request.receive, self._context.admission.start([turn.job], origin))
        except InvalidRequest as error:
            raise self._renamed(error) from error
        except Exception as error:
            raise caller_error(error, origin.label) from error
        return EventStream(
            self._events(turn, generations[0]), lambda: self._context.admission.end(generations), turn.media_type
        )

    async def _whole(self, turn: Turn, origin: Origin) -> Json:
        async with self._context.admission.running([turn.job], origin) as (generation,):
            for _ in turn.begin(generation):
                pass
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    for _ in turn.push(delta, generation):
                        pass
            return turn.whole(generation)

    async def _events(self, turn: Turn, generation: ActiveRequest) -> AsyncGenerator[bytes, None]:
        try:
            for told in turn.begin(generation):
                yield told
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    for told in turn.push(delta, generation):
                        yield told
        except Exception as error:
            shown = caller_error(error, "streaming")
            logger.info("stream %s broke off: %s", generation.handle.request_id, shown.message)
            for told in turn.fail(shown):
                yield told
