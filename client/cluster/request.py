"""One request over its lives: each world that works on it is a life, and its caller sees one stream of tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from allspan.client.cluster.affinity import BLOCK_TOKENS, block_keys
from allspan.client.cluster.world import World
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import DeadlineExceeded, from_code
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output, RequestTimings, ResultQueue, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.cluster_file import ClusterInfo
from allspan.protos.convert import options_to_wire, output_from_wire, sampling_to_wire

if TYPE_CHECKING:
    from allspan.client.cluster.replica import Replica

EXPECTED_TOKENS = 256
"""Of a request's output, as far as load is concerned: `max_tokens` is often a limit that nobody means to reach."""


class OpenRequest:
    """What a request needs to go on in another world: all that its first one was told, and all that came back.

    `wire_id`: what the ranks call it in this life. A world keeps the id of a request that it has cancelled for a while
    yet, so one that comes back to the same world (only the connection was lost) comes under another.
    `world`: that works on it now; None between two lives. `replica`: whose world that is, or was.
    `is_admitting`: it is on its way to the ranks of `world`; whoever sends it finds out what becomes of that.
    `is_stopping`: its caller wants no more of it.
    `losses`: lives that ended with their world, one after the other, without bringing a token.
    `carrier`: the task that looks for its next life.
    """

    def __init__(
        self,
        request_id: bytes,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`params` has a seed, so that every life draws the same tokens."""
        self.request_id = request_id
        self.wire_id = request_id
        self.prompt = tuple(prompt)
        self.params = params
        self.options = options or RequestOptions()
        self.queue = ResultQueue()
        self.token_ids: list[int] = []
        self.world: World | None = None
        self.replica: Replica | None = None
        self.is_admitting = False
        self.is_stopping = False
        self.losses = 0
        self.carrier: asyncio.Task[None] | None = None
        self._clock = clock
        self._started = clock()
        self._was_lost = False
        self._known_to: set[ClusterInfo] = set()
        self._earlier_s = 0.0
        self._tokens_before = 0
        self._hit_tokens = 0
        self._first_token: RequestTimings | None = None
        self._num_prompt_logprobs = 0
        self._repeated = 0

    @property
    def is_over(self) -> bool:
        """For its caller; the ranks may not know it yet."""
        return self.queue.state.is_final

    @property
    def remaining_s(self) -> float | None:
        """What is left of its `timeout_s`; None: it has none."""
        limit = self.options.timeout_s
        return None if limit is None else limit - (self._clock() - self._started)

    @property
    def work(self) -> int:
        """Tokens that its world has still to compute for it, as far as can be known here."""
        is_prefilling = len(self.token_ids) == self._tokens_before
        prefill = max(len(self.prompt) + self._tokens_before - self._hit_tokens, 0) if is_prefilling else 0
        return prefill + min(max(self.params.max_tokens - len(self.token_ids), 0), EXPECTED_TOKENS)

    def block_keys(self, with_output: bool = False) -> list[bytes]:
        """Of the pages that it may find or leave in a prefix cache; none if it keeps away from that."""
        if not self.options.prefix_cache:
            return []
        tokens = (*self.prompt, *self.token_ids) if with_output else self.prompt
        return block_keys(tokens, self.options.cache_salt)

    def check_time(self) -> None:
        """DeadlineExceeded when its `timeout_s` has run out."""
        remaining = self.remaining_s
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded(f"the request has run out of its timeout_s ({self.options.timeout_s:g} s)")

    def begin(self, replica: Replica, world: World, hit_blocks: int = 0) -> pb.StartRequestMessage:
        """Begins a life in a replica's world, and returns the payload for it. `hit_blocks`: blocks of its prompt that
        are expected in the cache there. DeadlineExceeded when its time has run out."""
        self.check_time()
        self.replica, self.world = replica, world
        if self._was_lost and world.info in self._known_to:
            self.wire_id = uuid.uuid4().bytes
        self._known_to.add(world.info)
        replica.requests[self.wire_id] = self
        self._earlier_s = self._clock() - self._started if self._was_lost else 0.0
        self._tokens_before = len(self.token_ids)
        self._hit_tokens = hit_blocks * BLOCK_TOKENS
        self._repeated = self._num_prompt_logprobs
        message = pb.StartRequestMessage(
            request_id=self.wire_id,
            model=world.info.model,
            prompt_token_ids=self.prompt,
            sampling=sampling_to_wire(self._params()),
            output_token_ids=self.token_ids,
        )
        options_to_wire(self.options, message)
        if self._was_lost and (remaining := self.remaining_s) is not None:
            message.timeout_s = max(remaining, 0.001)
        return message

    def leave(self) -> None:
        """Ends its life, if it has one. Idempotent."""
        self.world = None
        if self.replica is not None:
            self.replica.requests.pop(self.wire_id, None)

    def lose(self) -> None:
        """Ends its life, because its world has ended."""
        self.leave()
        self._was_lost = True
        self.losses += 1

    def deliver(self, message: pb.RequestOutput) -> None:
        """Puts what its world says into its queue, as its caller is to see it."""
        if message.error_code:
            self.queue.fail(from_code(message.error_code, message.error_message))
            return
        output = output_from_wire(message)
        if output.token_ids:
            self.token_ids.extend(output.token_ids)
            self.losses = 0
        if output.prompt_logprobs:
            output = replace(output, prompt_logprobs=self._new_prompt_logprobs(output))
        if output.timings is not None:
            output = replace(output, timings=self._timings(output, output.timings))
        self.queue.put(output)

    def cancel(self) -> None:
        """Ends it for its reader. Ignored after its end."""
        self.queue.put(Output(finish_reason="cancelled"))

    def finish(self, info: ClusterInfo) -> bool:
        """Ends it if its last token has been delivered, so that only the news of its end can have been lost."""
        reason, stop = self._end(info)
        if reason:
            first = self._first_token or RequestTimings(prompt_tokens=len(self.prompt))
            total = self._clock() - self._started
            timings = replace(first, total_s=total, output_tokens=len(self.token_ids))
            self.queue.put(Output(finish_reason=reason, stop_token_id=stop, timings=timings))
        return bool(reason)

    def _end(self, info: ClusterInfo) -> tuple[str, int | None]:
        tokens, params = self.token_ids, self.params
        if not tokens:
            return "", None
        last = tokens[-1]
        if last in params.stop_token_ids or (last in info.eos_token_ids and not params.ignore_eos):
            return "stop", last
        if any(tuple(tokens[-len(ids) :]) == ids for ids in params.stop_words_ids) and len(tokens) >= params.min_tokens:
            return "stop", None
        most = min(params.max_tokens, info.max_model_len - len(self.prompt))
        return ("length" if len(tokens) >= most else ""), None

    def _params(self) -> SamplingParams:
        """Prompt logprobs that have all come are not asked for again."""
        num = self._num_prompt_logprobs
        has_all = bool(self.token_ids) or 0 < num >= len(self.prompt) - 1
        if self.params.prompt_logprobs is not None and has_all:
            return self.params.with_(prompt_logprobs=None)
        return self.params

    def _new_prompt_logprobs(self, output: Output) -> tuple[TokenLogprob, ...]:
        """Without those that an earlier life has brought: a world sends them from the first on."""
        known = min(self._repeated, len(output.prompt_logprobs))
        self._repeated -= known
        self._num_prompt_logprobs += len(output.prompt_logprobs) - known
        return output.prompt_logprobs[known:]

    def _timings(self, output: Output, timings: RequestTimings) -> RequestTimings | None:
        """As if one world had done it all: from the first arrival on, and with the first token only once."""
        first, earlier = self._first_token, self._earlier_s
        if not self._was_lost:
            seen = timings
        elif first is None:
            seen = replace(
                timings,
                queue_s=earlier + timings.queue_s,
                ttft_s=earlier + timings.ttft_s if timings.ttft_s else 0.0,
                total_s=earlier + timings.total_s,
                arrived_at=timings.arrived_at - earlier,
            )
        elif output.finish_reason:
            preemptions = first.preemptions + timings.preemptions
            tokens = len(self.token_ids)
            seen = replace(first, total_s=earlier + timings.total_s, output_tokens=tokens, preemptions=preemptions)
        else:
            return None
        if output.token_ids and first is None:
            self._first_token = seen
        return seen
