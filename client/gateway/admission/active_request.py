"""One running request in the gateway: its text as it comes, and one log line at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from allspan.client.gateway.engine_protocol import GatewayEngine
from allspan.client.gateway.telemetry.recorder import RequestRecord
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos.api.errors import AllspanError, RequestCancelled
from allspan.protos.api.results import Output, RequestHandle, RequestTimings, ResultQueue, TokenLogprob
from allspan.protos.text.stream.text_stream import TextDelta, TextStream

PromptLogprob = tuple[int, TokenLogprob]
"""A prompt's token and what the model gave it."""

logger = logging.getLogger("allspan.gateway")


class ActiveRequest:
    """Read `deltas` once; `close` in any case."""

    def __init__(
        self,
        engine: GatewayEngine,
        handle: RequestHandle,
        queue: ResultQueue,
        stream: TextStream,
        prompt: Sequence[int],
        origin: Origin,
        record: RequestRecord,
    ) -> None:
        self.handle = handle
        self.origin = origin
        self.num_prompt_tokens = len(prompt)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.vector = b""
        """The result of a request with pooling."""
        self.prompt_logprobs: list[PromptLogprob] = []
        """Log-probabilities of the prompt that have come so far; the first is the prompt's second token's."""
        self._engine = engine
        self._prompt = prompt
        self._queue = queue
        self._stream = stream
        self._record = record
        self._reason, self._error = "cancelled", ""
        self._must_stop = False

    @property
    def timings(self) -> RequestTimings:
        """What is measured of it so far."""
        return self._queue.timings or RequestTimings()

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yields the text of each engine step (or of several, for a slower reader); the last delta has the finish
        reason.

        Raises the request's AllspanError when it failed.
        """
        try:
            while (output := await self._queue.aget()) is not None or not self._queue.state.is_final:
                if output is None:
                    continue
                delta = self._read(output)
                if delta.stopped_early:
                    self._must_stop = True
                if delta.finish_reason == "cancelled":
                    break
                yield delta
                if delta.finished:
                    self._reason = delta.finish_reason
                    return
        except AllspanError as error:
            self._reason, self._error = error.code, error.message
            raise
        raise RequestCancelled("the request was cancelled on the server")

    def _read(self, output: Output) -> TextDelta:
        if output.timings is not None:
            self.num_cached_tokens = output.timings.cached_tokens
        if output.prompt_logprobs:
            ids = self._prompt[len(self.prompt_logprobs) + 1 :]
            self.prompt_logprobs += zip(ids, output.prompt_logprobs, strict=False)
        self.vector = self.vector or output.vector
        delta = self._stream.push(output)
        self.num_output_tokens += len(delta.token_ids)
        self._record.output(len(delta.token_ids))  # what is measured: here for each output, and at the `end`
        return delta

    def fail(self, error: AllspanError) -> None:
        """Ends it for its reader, and on the engine when it is closed."""
        self._must_stop = True
        self._queue.fail(error)

    async def stop(self) -> None:
        """Ends it on the engine; its reader sees it cancelled. Idempotent."""
        await self._engine.astop_request(self.handle)

    async def close(self) -> None:
        """Stops it if it still runs, lets the engine forget it, and logs its end."""
        try:
            if self._must_stop or not self._queue.state.is_final:
                await self.stop()
        except AllspanError as error:
            logger.info("request %s could not be stopped: %s", self.handle.request_id, error.message)
        finally:
            self._engine.release_request(self.handle)
            self._record.end(self._reason, self.num_output_tokens, self._queue.timings, self._error)


async def interleave(generations: Sequence[ActiveRequest]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """(place in `generations`, delta) as they come; the first failure of any ends all."""
    if len(generations) == 1:
        async with aclosing(generations[0].deltas()) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    streams = [generation.deltas() for generation in generations]
    waiting = {asyncio.ensure_future(anext(stream)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                place = waiting.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                yield place, delta
                waiting[asyncio.ensure_future(anext(streams[place]))] = place
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
