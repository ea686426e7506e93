"""One call of `Engine.generate`: every prompt at once, within what the queue takes, results in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from allspan.protos.api.engine import Completion
from allspan.protos.api.errors import QueueFull
from allspan.protos.api.results import Output, RequestHandle, ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text.stream.completion import CompletionBuilder
from allspan.protos.text.tokenizers.tokenizer import Tokenizer

QUEUE_WAIT_S = 60.0
FIRST_PAUSE_S = 0.005
LAST_PAUSE_S = 0.25

Start = Callable[[Sequence[int], SamplingParams], tuple[RequestHandle, ResultQueue]]
Release = Callable[[RequestHandle], None]


class Generation:
    """However the call ends, none of its requests goes on."""

    def __init__(self, start: Start, release: Release, tokenizer: Tokenizer | None) -> None:
        self._start = start
        self._release = release
        self._tokenizer = tokenizer
        self._started: list[tuple[RequestHandle, ResultQueue]] = []

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        """`params` carry seeds. Raises the first request's error."""
        try:
            for pair in zip(prompts, params, strict=True):
                for pause in self._admit(*pair):
                    time.sleep(pause)
            outputs = [list(queue) for _, queue in self._started]
        finally:
            self._stop()
        return self._completions(prompts, params, outputs)

    async def arun(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        """`run` for asyncio."""
        try:
            for pair in zip(prompts, params, strict=True):
                for pause in self._admit(*pair):
                    await asyncio.sleep(pause)
            outputs = [[output async for output in queue] for _, queue in self._started]
        finally:
            self._stop()
        return self._completions(prompts, params, outputs)

    def _admit(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[float]:
        """Starts a request; yields pauses to make while the queue is full. Raises QueueFull when for QUEUE_WAIT_S
        neither it took the request nor did one of this call get on."""
        pause, seen, deadline = FIRST_PAUSE_S, -1, 0.0
        while True:
            try:
                self._started.append(self._start(prompt, params))
                return
            except QueueFull:
                done = sum(queue.num_tokens for _, queue in self._started)
                if done != seen:
                    seen, deadline = done, time.monotonic() + QUEUE_WAIT_S
                if time.monotonic() > deadline:
                    raise
            yield pause
            pause = min(2 * pause, LAST_PAUSE_S)

    def _stop(self) -> None:
        for handle, _ in self._started:
            self._release(handle)

    def _completions(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        outputs: Sequence[Sequence[Output]],
    ) -> list[Completion]:
        return [
            self._completion(handle, prompt, entry, parts)
            for (handle, _), prompt, entry, parts in zip(self._started, prompts, params, outputs, strict=True)
        ]

    def _completion(
        self, handle: RequestHandle, prompt: Sequence[int], params: SamplingParams, outputs: Sequence[Output]
    ) -> Completion:
        builder = CompletionBuilder(handle.request_id, prompt, params, self._tokenizer)
        for output in outputs:
            builder.add(output)
        return builder.build()
