"""One call of `generate`: every prompt at once, within what the cluster's queue takes, results in order."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

from allspan.client.cluster.requests import Session
from allspan.protos.api.engine import Completion
from allspan.protos.api.errors import AllspanError, QueueFull, Unavailable
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text import Tokenizer
from allspan.protos.text.stream.completion import CompletionBuilder

MAX_IN_FLIGHT = 512
QUEUE_WAIT_S = 60.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0


class Generation:
    """Runs on the session's loop. Whatever ends the call early (an error, its cancellation) stops all its requests."""

    def __init__(self, session: Session, tokenizer: Tokenizer | None, options: RequestOptions | None = None) -> None:
        self._session = session
        self._options = options
        self._tokenizer = tokenizer
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._last_progress = time.monotonic()

    async def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        """`params` carry seeds. Raises the first request's error."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(*pair)) for pair in zip(prompts, params, strict=True)]
        except* AllspanError as errors:
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            failure = first
        else:
            return [task.result() for task in tasks]
        raise failure

    async def _one(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        async with self._slots:
            request_id = uuid.uuid4()
            queue = await self._admit(request_id.bytes, prompt, params)
            try:
                return await self._collect(request_id, queue, prompt, params)
            finally:
                self._session.release(request_id.bytes)

    async def _admit(self, request_id: bytes, prompt: Sequence[int], params: SamplingParams) -> ResultQueue:
        """Waits while the queue is full, as long as this call's requests get on or it has not waited long; and while
        those of its requests that are in have to wait for another world."""
        pause = FIRST_RETRY_S
        started = time.monotonic()
        while True:
            try:
                return await self._session.start(request_id, prompt, params, self._options)
            except QueueFull:
                if time.monotonic() - max(started, self._last_progress) > QUEUE_WAIT_S:
                    raise
            except Unavailable:
                if not self._session.queues():
                    raise
                await self._session.outlast()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY_S)

    async def _collect(
        self, request_id: uuid.UUID, queue: ResultQueue, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        builder = CompletionBuilder(request_id.hex, prompt, params, self._tokenizer)
        while not builder.is_finished and (output := await queue.aget()) is not None:
            self._last_progress = time.monotonic()
            builder.add(output)
        return builder.build()
