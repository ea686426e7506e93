"""Running requests of a client, read as their tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import ResultQueue
from support.waiting import wait_until


class Streams:
    """Requests whose tokens are collected by whoever calls `read`."""

    def __init__(
        self,
        engine: ClientEngine,
        listed: Sequence[list[int]],
        params: Sequence[SamplingParams],
        options: Sequence[RequestOptions | None] = (),
    ) -> None:
        """`options` for each, or none."""
        asked = zip(listed, params, options or [None] * len(listed), strict=True)
        self.queues: list[ResultQueue] = [
            engine.start_request(prompt, each, options=own)[1] for prompt, each, own in asked
        ]
        self.tokens: list[list[int]] = [[] for _ in self.queues]

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def is_over(self) -> bool:
        return all(queue.state.is_final for queue in self.queues)

    def read(self) -> None:
        for queue, tokens in zip(self.queues, self.tokens, strict=True):
            if (output := queue.get_nowait()) is not None:
                tokens.extend(output.token_ids)

    def read_until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        def reached() -> bool:
            self.read()
            return condition()

        wait_until(reached, timeout, what)

    def read_to_the_end(self) -> list[tuple[int, ...]]:
        self.read_until(lambda: self.is_over, 90.0, "the end of every stream")
        self.read()
        return [tuple(tokens) for tokens in self.tokens]
