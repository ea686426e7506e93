"""`generate` of every engine: starts many prompts as the engine's queue takes them, and returns results in order."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from allspan.protos.api.engine import Completion
from allspan.protos.api.errors import AllspanError, DeadlineExceeded, QueueFull, Unavailable
from allspan.protos.api.results import Output, RequestHandle, RequestState, ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text.stream.completion import CompletionBuilder
from allspan.protos.text.tokenizers.tokenizer import Tokenizer

MAX_IN_FLIGHT = 512
"""Requests of one call that are started and not finished."""
STARTS_AT_ONCE = 32
"""Most requests that are sent to the engine together, fewer after it has refused one."""
QUEUE_WAIT_S = 60.0
"""A queue that stays full for this long while no request of the call gets a token fails the call."""
FIRST_PAUSE_S = 0.005
LAST_PAUSE_S = 0.25
READ_S = 0.05
"""Longest wait for one request's tokens before the others are looked at for stop strings and failures."""

T = TypeVar("T")
Work = tuple[Sequence[int], SamplingParams]
"""A prompt's token ids, and its parameters with a seed."""
Started = tuple[RequestHandle, ResultQueue]


class Waits(Protocol):
    """The two ways in which a call of `generate` waits: on an asyncio loop, or by blocking its thread."""

    async def sleep(self, seconds: float) -> None: ...

    async def read(self, queue: ResultQueue, seconds: float) -> Output | None:
        """See `ResultQueue.get`."""


class AsyncWaits:
    """Waits on the running asyncio loop."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def read(self, queue: ResultQueue, seconds: float) -> Output | None:
        return await queue.aget(seconds)


class BlockingWaits:
    """Blocks the calling thread, so that a coroutine that waits in no other way runs through; see `run_blocking`."""

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def read(self, queue: ResultQueue, seconds: float) -> Output | None:
        return queue.get(seconds)


class BatchCalls(Protocol):
    """The calls of an engine that `BatchGenerate` uses."""

    async def start(self, work: Sequence[Work]) -> Sequence[Started | AllspanError]:
        """Starts requests; returns one reply for each. When it raises, none of them runs."""

    async def outlast(self, error: Unavailable) -> None:
        """Returns when starting again may succeed after this error; raises when it will not."""

    def release(self, handle: RequestHandle) -> None:
        """Ends a request, if it still runs."""


@dataclass(frozen=True, slots=True)
class _Request:
    handle: RequestHandle
    queue: ResultQueue
    builder: CompletionBuilder


class BatchGenerate:
    """One call of `generate`. However it ends, none of its requests goes on.

    Results are read in the order of the prompts, so that one request at a time wakes the reader. Requests with stop
    strings are looked at meanwhile: the reader finds those, and ends the request.
    """

    def __init__(self, calls: BatchCalls, waits: Waits, tokenizer: Tokenizer | None) -> None:
        """Prepares the call. Without a tokenizer, completions carry token ids and an empty text."""
        self._calls = calls
        self._waits = waits
        self._tokenizer = tokenizer
        self._started: dict[int, _Request] = {}
        self._with_stop: dict[int, _Request] = {}
        self._next_look = 0.0

    async def run(self, work: Sequence[Work]) -> list[Completion]:
        """Returns the completions in the order of the prompts. Raises the error of a request that fails."""
        try:
            await self._start_all(work)
            return [await self._collect(self._started[index]) for index in range(len(work))]
        finally:
            for request in self._started.values():
                self._calls.release(request.handle)

    async def _start_all(self, work: Sequence[Work]) -> None:
        """Starts every request. Raises QueueFull when for QUEUE_WAIT_S neither the queue took a request nor one of this
        call got a token."""
        waiting = deque(enumerate(work))
        width, pause = STARTS_AT_ONCE, FIRST_PAUSE_S
        seen, deadline = (-1, -1), 0.0
        while waiting:
            room = MAX_IN_FLIGHT - sum(not request.queue.state.is_final for request in self._started.values())
            chunk = [waiting.popleft() for _ in range(min(width, room, len(waiting)))]
            refused = await self._start(chunk)
            waiting.extendleft(entry for entry, _ in reversed(refused))
            self._look()
            if chunk and not refused:
                width, pause = min(2 * width, STARTS_AT_ONCE), FIRST_PAUSE_S
                continue
            width = 1
            progress = (len(self._started), sum(request.queue.num_tokens for request in self._started.values()))
            if progress != seen:
                seen, deadline = progress, time.monotonic() + QUEUE_WAIT_S
            for _, error in refused:
                if isinstance(error, Unavailable):
                    await self._calls.outlast(error)
                elif time.monotonic() > deadline:
                    raise error
            await self._waits.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)

    async def _start(self, chunk: Sequence[tuple[int, Work]]) -> list[tuple[tuple[int, Work], AllspanError]]:
        """Starts some requests; returns those that may be tried again, with their errors. Raises other errors."""
        refused: list[tuple[tuple[int, Work], AllspanError]] = []
        failures: list[AllspanError] = []
        replies = await self._calls.start([work for _, work in chunk]) if chunk else []
        for (index, (prompt, params)), reply in zip(chunk, replies, strict=True):
            if isinstance(reply, tuple):
                handle, queue = reply
                builder = CompletionBuilder(handle.request_id, prompt, params, self._tokenizer)
                self._started[index] = _Request(handle, queue, builder)
                if params.stop:
                    self._with_stop[index] = self._started[index]
            elif isinstance(reply, (QueueFull, Unavailable)):
                refused.append(((index, (prompt, params)), reply))
            else:
                failures.append(reply)
        if failures:
            raise failures[0]
        return refused

    async def _collect(self, request: _Request) -> Completion:
        queue, builder = request.queue, request.builder
        while not builder.is_finished:
            output = await self._waits.read(queue, READ_S)
            if output is not None:
                builder.add(output)
            elif _drain(request):
                break
            self._look()
        self._calls.release(request.handle)
        return builder.build()

    def _look(self) -> None:
        """Ends the requests that have met a stop string. Raises the error of a request that has failed."""
        for index, request in list(self._with_stop.items()):
            if _drain(request):
                del self._with_stop[index]
                self._calls.release(request.handle)
        if (now := time.monotonic()) > self._next_look:
            self._next_look = now + READ_S
            for request in self._started.values():
                if request.queue.state is RequestState.FAILED:
                    _drain(request)


def _drain(request: _Request) -> bool:
    """Reads what has come, without waiting; returns whether that is all. Raises the request's error."""
    is_final = request.queue.state.is_final
    while not request.builder.is_finished and (output := request.queue.get_nowait()) is not None:
        request.builder.add(output)
    return is_final or request.builder.is_finished


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never waits on an asyncio loop, in the calling thread."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("the coroutine waits on an asyncio loop")


def wait_all_finished(queues: Sequence[ResultQueue], handle: RequestHandle | None, timeout: float | None) -> None:
    """`sync_request` of every engine: waits for the end of these requests. Raises DeadlineExceeded."""
    deadline = None if timeout is None else time.monotonic() + timeout
    for queue in queues:
        if not queue.wait_finished(None if deadline is None else max(0.0, deadline - time.monotonic())):
            what = "requests run" if handle is None else f"request {handle.request_id} runs"
            raise DeadlineExceeded(f"{what} still after timeout ({timeout:g} s)")
