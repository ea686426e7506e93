"""The caller's view of a running request: its handle and the queue that its tokens arrive in."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from allspan.protos.api.errors import AllspanError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token's log-probability and the most likely tokens', best first. Natural logarithm."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """A request's statistics. Seconds on the leader's clock, from the arrival of the request there."""

    queue_s: float = 0.0
    """Seconds until its first step began."""
    ttft_s: float = 0.0
    """Seconds until its first token; 0 before it."""
    total_s: float = 0.0
    """Seconds until now, or until its end."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV the prefix cache had."""
    output_tokens: int = 0
    arrived_at: float = 0.0
    """Seconds since 1970."""
    host_cached_tokens: int = 0
    """Number of the cached tokens that came from the host tier."""
    preemptions: int = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens over the time from the queue to the first token; 0 before it."""
        return self.prompt_tokens / (self.ttft_s - self.queue_s) if self.ttft_s > self.queue_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens after the first over the time that they took; 0 before there are two."""
        seconds = self.total_s - self.ttft_s
        return (self.output_tokens - 1) / seconds if self.output_tokens > 1 and seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of a request since the last read. `finish_reason` is "", "stop", "length" or "cancelled"."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    stop_token_id: int | None = None
    timings: RequestTimings | None = None
    """The request's statistics: with the first token, and with the finish reason."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the prompt's next tokens, beginning with its second; empty unless requested. They may come
    before any token."""
    hidden_state: tuple[float, ...] = ()
    """What the model's head read of the prompt's last token; empty unless requested."""
    vector: bytes = b""
    """The result of a request with `RequestOptions.pooling`, with its finish reason: float32, little-endian."""

    def merged(self, later: Output) -> Output:
        return Output(
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            later.finish_reason or self.finish_reason,
            later.stop_token_id if later.stop_token_id is not None else self.stop_token_id,
            later.timings or self.timings,
            self.prompt_logprobs + later.prompt_logprobs,
            self.hidden_state or later.hidden_state,
            self.vector or later.vector,
        )


class RequestState(enum.Enum):
    """WAITING → GENERATING → FINISHED | CANCELLED | FAILED; nothing leaves the last three."""

    WAITING = "waiting"
    GENERATING = "generating"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """Names one request: 32 hexadecimal digits. Hashable; valid until it is released."""

    request_id: str
    model: str = field(default="", compare=False)


class ResultQueue:
    """Tokens of one request, from the thread that receives them to the one that reads them.

    Reading consumes. A failed request raises its error from every read once the tokens before it are read.
    Safe for one producer and any number of reading threads; `aget` for asyncio.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._num_blocked = 0
        """Threads that wait on the condition."""
        self._pending: Output | None = None
        self._state = RequestState.WAITING
        self._error: AllspanError | None = None
        self._num_tokens = 0
        self._timings: RequestTimings | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def state(self) -> RequestState:
        return self._state

    @property
    def num_tokens(self) -> int:
        """Output tokens that have arrived so far, read or not."""
        return self._num_tokens

    @property
    def timings(self) -> RequestTimings | None:
        """The request's statistics as they last came: with its first token and with its end. Reading keeps them."""
        return self._timings

    def put(self, output: Output) -> None:
        """Adds tokens; an output with a finish reason ends the request. Ignored after the end."""
        with self._lock:
            if self._state.is_final:
                return
            self._pending = output if self._pending is None else self._pending.merged(output)
            self._num_tokens += len(output.token_ids)
            self._timings = output.timings or self._timings
            if output.finish_reason:
                cancelled = output.finish_reason == "cancelled"
                self._state = RequestState.CANCELLED if cancelled else RequestState.FINISHED
            elif output.token_ids:
                self._state = RequestState.GENERATING
            self._wake()

    def fail(self, error: AllspanError) -> None:
        """Ends the request with an error. Ignored after the end."""
        with self._lock:
            if self._state.is_final:
                return
            self._error = error
            self._state = RequestState.FAILED
            self._wake()

    def get(self, timeout: float | None = None) -> Output | None:
        """Waits for tokens and returns all that arrived since the last read, merged.

        None after `timeout` seconds without any, and None once the request has ended and everything was read.
        Raises the request's AllspanError when it failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._pending is None and not self._state.is_final:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._wait(left)
            return self._take()

    def get_nowait(self) -> Output | None:
        """`get` without waiting."""
        with self._lock:
            return self._take()

    async def aget(self, timeout: float | None = None) -> Output | None:
        """`get` for asyncio. Cancelling it loses no tokens: they are taken only on the way out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._pending is not None or self._state.is_final:
                    return self._take()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
            try:
                if left is None:
                    await waiter
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(left):  # wait_for of Python 3.11 may swallow a cancellation
                            await waiter
            finally:
                if not waiter.done() or waiter.cancelled():  # else a wake has removed it already
                    with self._lock, contextlib.suppress(ValueError):
                        self._waiters.remove(waiter)

    def __iter__(self) -> Iterator[Output]:
        """Outputs until the request has ended; raises its error when it failed."""
        while (output := self.get()) is not None:
            yield output

    async def __aiter__(self) -> AsyncIterator[Output]:
        """`__iter__` for `async for`."""
        while (output := await self.aget()) is not None:
            yield output

    def wait_finished(self, timeout: float | None = None) -> bool:
        """Waits for the end without reading; False when `timeout` seconds ran out first."""
        with self._lock:
            deadline = None if timeout is None else time.monotonic() + timeout
            while not self._state.is_final:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._wait(left)
            return True

    def _wait(self, timeout: float | None) -> None:
        """Gives the lock up until something has come, or for `timeout` seconds."""
        self._num_blocked += 1
        try:
            self._condition.wait(timeout)
        finally:
            self._num_blocked -= 1

    def _take(self) -> Output | None:
        output, self._pending = self._pending, None
        if output is None and self._error is not None:
            raise self._error.with_traceback(None)  # else every read would lengthen the same traceback
        return output

    def _wake(self) -> None:
        if self._num_blocked:
            self._condition.notify_all()
        if not self._waiters:
            return
        here = asyncio._get_running_loop()
        for waiter in self._waiters:
            if (loop := waiter.get_loop()) is here:
                _ring(waiter)
            else:
                with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
                    loop.call_soon_threadsafe(_ring, waiter)
        self._waiters.clear()


def _ring(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
