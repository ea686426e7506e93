"""One request over its attempts: each world that works on it is an attempt, and its caller sees one stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from allspan.client.cluster.output import RequestOutput
from allspan.client.cluster.replica import Replica
from allspan.client.cluster.routing.knowledge import MAX_PAGES
from allspan.client.cluster.world import WorldClient
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import NO_ADAPTER
from allspan.protos.api.errors import AllspanError, DeadlineExceeded, from_code
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.cluster_file import ClusterInfo
from allspan.protos.convert import options_to_wire, output_from_wire, sampling_to_wire
from allspan.protos.page_keys import PageShape

EXPECTED_TOKENS = 256
"""Output tokens that count as load for a request: `max_tokens` is often far above the real length."""


@dataclass(slots=True)
class Attempt:
    """A request in one world, under the id that the ranks of that world know it by."""

    replica: Replica
    world: WorldClient
    wire_id: bytes
    hit_tokens: int
    """Tokens of the prompt that are expected in the replica's prefix cache."""
    is_open: bool = True
    """The world may still send outputs for it."""


class Owner(Protocol):
    """Decides what follows when an attempt of a request ends."""

    def finished(self, request: OpenRequest, reason: str) -> None:
        """Called when a request's final output has been delivered."""

    def failed(self, request: OpenRequest, error: AllspanError) -> None:
        """Called when the ranks have ended a request with an error, which its caller has not seen yet."""

    def lost(self, request: OpenRequest) -> None:
        """Called when the world of a request's attempt is lost."""


class OpenRequest:
    """The state of a request that is needed to resume it in another world: the parameters first sent, and the outputs
    that came back.

    `attempt`: the last one; None before the first. `is_admitting`: it is on its way to the ranks of that attempt; the
    task that sends it finds out what becomes of it. `is_stopping`: its caller wants no more of it.
    `losses`: attempts in a row that were lost without bringing a token. `retry_task`: makes the next attempt.
    """

    def __init__(
        self,
        request_id: bytes,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None,
        owner: Owner,
        adapter: int = NO_ADAPTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`params` has a seed, so that every attempt draws the same tokens; `adapter`: the digest of the load of its
        adapter, the same in every world."""
        self.request_id = request_id
        self.prompt = tuple(prompt)
        self.params = params
        self.options = options or RequestOptions()
        self.output = RequestOutput(len(self.prompt))
        self.attempt: Attempt | None = None
        self.is_admitting = False
        self.is_stopping = False
        self.losses = 0
        self.retry_task: asyncio.Task[None] | None = None
        self.adapter = adapter
        self._owner = owner
        started = clock()
        self._elapsed: Callable[[], float] = lambda: clock() - started
        self._was_lost = False
        self._known_to: set[ClusterInfo] = set()

    @property
    def queue(self) -> ResultQueue:
        """The results, for its caller."""
        return self.output.queue

    @property
    def world(self) -> WorldClient | None:
        """The world that works on it now; None between two attempts."""
        return self.attempt.world if self.attempt is not None and self.attempt.is_open else None

    @property
    def replica(self) -> Replica | None:
        """The replica of the last attempt."""
        return self.attempt.replica if self.attempt is not None else None

    @property
    def is_over(self) -> bool:
        """True once it has ended for its caller; the ranks may not know it yet."""
        return self.queue.state.is_final

    @property
    def remaining_s(self) -> float | None:
        """Seconds left of its `timeout_s`; None when it has none."""
        limit = self.options.timeout_s
        return None if limit is None else limit - self._elapsed_s

    @property
    def work(self) -> int:
        """Estimated number of tokens that its world has still to compute for it."""
        hits = self.attempt.hit_tokens if self.attempt is not None else 0
        prefill = max(self.output.num_computed_before - hits, 0) if self.output.is_prefilling else 0
        return prefill + min(max(self.params.max_tokens - len(self.output.token_ids), 0), EXPECTED_TOKENS)

    def page_keys(self, shape: PageShape) -> list[int]:
        """The keys of the first pages of this shape that it leaves in a prefix cache, those of its output too; empty
        if it does not use that."""
        return list(self._keys(shape, (*self.prompt, *self.output.token_ids)))

    def prompt_keys(self, shape: PageShape) -> Iterator[int]:
        """The keys of its prompt's first pages of this shape, made as they are read; none if it does not use the prefix
        cache."""
        return self._keys(shape, self.prompt)

    def check_time(self) -> None:
        """Raises DeadlineExceeded when its `timeout_s` has run out."""
        remaining = self.remaining_s
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded(f"the request has run out of its timeout_s ({self.options.timeout_s:g} s)")

    def begin(self, replica: Replica, world: WorldClient, hit_tokens: int = 0) -> pb.StartRequestMessage:
        """Begins an attempt in a replica's world, and returns the payload for it. `hit_tokens`: tokens of its prompt
        that are expected in the cache there. Raises DeadlineExceeded when its time has run out."""
        self.check_time()
        is_first = self.attempt is None
        wire_id = self.attempt.wire_id if self.attempt is not None else self.request_id
        if self._was_lost and world.info in self._known_to:
            # A world remembers the id of a request that it cancelled for a while: this one needs another there.
            wire_id = uuid.uuid4().bytes
        self._known_to.add(world.info)
        self.attempt = Attempt(replica, world, wire_id, hit_tokens)
        world.requests[wire_id] = self
        self.output.begin_attempt(self._was_lost, self._elapsed_s)
        message = pb.StartRequestMessage(
            request_id=wire_id,
            model=world.info.model,
            prompt_token_ids=self.prompt,
            sampling=sampling_to_wire(self._params()),
            output_token_ids=self.output.token_ids,
        )
        options_to_wire(self.options, message)
        if self.adapter != NO_ADAPTER:
            message.adapter_digest = self.adapter
        if not is_first and (remaining := self.remaining_s) is not None:
            message.timeout_s = max(remaining, 0.001)
        return message

    def leave(self) -> None:
        """Ends the present attempt, if there is one. Idempotent."""
        if self.attempt is not None and self.attempt.is_open:
            self.attempt.is_open = False
            self.attempt.world.requests.pop(self.attempt.wire_id, None)

    def lose(self) -> None:
        """Ends the present attempt because its world is lost."""
        self.leave()
        self._was_lost = True
        self.losses += 1
        self._owner.lost(self)

    def deliver(self, message: pb.RequestOutput) -> None:
        """Takes what its world has sent for it."""
        if message.error_code:
            self._owner.failed(self, from_code(message.error_code, message.error_message))
            return
        output = output_from_wire(message)
        if output.token_ids:
            self.losses = 0
        self.output.add(output)
        if output.finish_reason:
            self._owner.finished(self, output.finish_reason)

    def finish(self, info: ClusterInfo) -> bool:
        """See `RequestOutput.finish`."""
        return self.output.finish(self.params, info, self._elapsed_s)

    def _keys(self, shape: PageShape, tokens: Sequence[int]) -> Iterator[int]:
        if not self.options.prefix_cache:
            return iter(())
        return shape.keys(tokens, len(self.prompt), self.options.cache_salt, MAX_PAGES, self.adapter)

    @property
    def _elapsed_s(self) -> float:
        return self._elapsed()

    def _params(self) -> SamplingParams:
        """Prompt log-probabilities that have all come are not asked for again."""
        if self.params.prompt_logprobs is not None and self.output.has_prompt_logprobs:
            return self.params.with_(prompt_logprobs=None)
        return self.params
