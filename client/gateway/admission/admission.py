"""Admission shared by HTTP and gRPC: from prompts and sampling fields to running requests, never more than allowed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allspan.client.gateway.admission.active_request import Generation
from allspan.client.gateway.admission.bad_words import bad_words_ids
from allspan.client.gateway.admission.grammar_check import GrammarCheck
from allspan.client.gateway.admission.prompt import AS_USUAL, PromptOptions
from allspan.client.gateway.auth.caller import Caller
from allspan.client.gateway.chat.messages import characters
from allspan.client.gateway.chat.setup import ChatSetup
from allspan.client.gateway.chat.template import Rendering
from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.engine_protocol import GatewayEngine
from allspan.client.gateway.offload import off_loop
from allspan.client.gateway.served_model import ServedModel
from allspan.client.gateway.telemetry.recorder import Telemetry
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos.api.errors import AllspanError, InternalError, InvalidRequest, QueueFull, Unavailable
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.prompts import check_ids, check_length
from allspan.protos.api.results import RequestHandle
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text import Tokenizer
from allspan.protos.text.stream.text_stream import PLAIN_TEXT, TextOptions, TextStream

RETRY_AFTER_S = 1
"""What a caller is told when there is no room."""
MAX_PROMPT_LOGPROBS = 1 << 17
"""Of one prompt; each becomes an object in the answer, and all of them at once."""
DRAIN_LOG_S = 5.0

logger = logging.getLogger("allspan.gateway")


@dataclass(frozen=True)
class Job:
    """One prompt and how to go on from it."""

    token_ids: Sequence[int]
    params: SamplingParams
    continues: bool = True
    """The output goes on from the prompt's text, rather than being an answer of its own."""
    options: RequestOptions | None = None
    text: TextOptions = PLAIN_TEXT
    tokenizer: Tokenizer | None = None
    """Of the output's text; None: the gateway's."""
    grammar_field: str = "grammar"
    """What the caller calls `params.grammar`."""


class Submitter:
    """Counts what runs, refuses what is too much or too late, and ends what its caller leaves."""

    def __init__(self, engine: GatewayEngine, tokenizer: Tokenizer, model: ServedModel, config: GatewayConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat = ChatSetup.of(tokenizer, config.chat)
        self.model = model
        self.limits = config.limits
        self.telemetry = Telemetry(model.name)
        self.grammars = GrammarCheck(tokenizer, model.vocab_size, config.limits)
        self._max_requests = config.limits.max_concurrent_requests
        self.max_chars = config.limits.max_prompt_chars or max(65536, 64 * model.max_model_len)
        self._admitted = 0
        self._running: set[Generation] = set()
        self._starting: set[Origin] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.hold = ""
        """Why the operator lets nothing new in, "" while it comes in."""

    @property
    def is_ready(self) -> bool:
        """New requests are welcome."""
        return not self.down_cause

    @property
    def num_open(self) -> int:
        """Requests inside the gateway."""
        return self._admitted

    @property
    def most_open(self) -> int:
        return self._max_requests

    @property
    def down_cause(self) -> str:
        """Why new requests are not welcome, "" while they are."""
        return "the server is shutting down" if self._draining else self.hold or self.engine.down_cause

    def running_requests(self) -> list[Generation]:
        """What runs now."""
        return list(self._running)

    async def encode(
        self, prompt: str | Sequence[int], field: str = "prompt", options: PromptOptions = AS_USUAL
    ) -> Sequence[int]:
        """Token ids of a prompt, checked; InvalidRequest names what does not fit."""
        if isinstance(prompt, str):
            self._check_chars(len(prompt), field)
            if "\0" in prompt:
                raise InvalidRequest(f"{field} has a NUL character at {prompt.index(chr(0))}", field)
            if not prompt and not options.only_counted:
                raise InvalidRequest(f"{field} is empty, must have at least one token", field)
            special = options.add_special_tokens is not False
            ids: Sequence[int] = await off_loop(len(prompt), self.tokenizer.encode, prompt, special)
        else:
            if len(prompt) > self.max_chars:
                raise InvalidRequest(f"{field} has {len(prompt)} entries, at most {self.max_chars}", field)
            ids = prompt
        ids = options.truncated(ids, self.model.max_model_len)
        if not options.only_counted:
            check_length(len(ids), self.model, field)
        check_ids(ids, self.model, field)
        return ids

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: PromptOptions = AS_USUAL,
        how: Rendering | None = None,
    ) -> Sequence[int]:
        """Token ids of a conversation through the chat template; InvalidRequest when there is none."""
        if not self.tokenizer.has_chat_template:
            raise InvalidRequest(
                f"model {self.model.name!r} has no chat template (a base model?): use completions or a text prompt, "
                "or give the server one with --chat-template",
                "messages",
            )
        how = how or Rendering(generation_prompt=options.add_generation_prompt)
        chars = characters(messages) + how.characters
        self._check_chars(chars, "messages")
        special = bool(options.add_special_tokens)
        ids: Sequence[int] = await self.chat.encode(messages, how, chars, special)
        ids = options.truncated(ids, self.model.max_model_len)
        if not options.only_counted:
            check_length(len(ids), self.model, "messages")
        check_ids(ids, self.model, "messages")
        return ids

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `SamplingParams`: `bad_words`, which are texts, become `bad_words_ids`."""
        fields = dict(given)
        if words := fields.pop("bad_words", None):
            ids = bad_words_ids(self.tokenizer, words)
            fields["bad_words_ids"] = (*fields.get("bad_words_ids", ()), *ids)
        return fields

    def params(
        self, given: Mapping[str, Any], num_prompt_tokens: int, default_max_tokens: int | None
    ) -> SamplingParams:
        """Given fields over the model's defaults; max_tokens is `default_max_tokens`, None the rest of the context."""
        room = self.model.max_model_len - num_prompt_tokens
        values = self.model.defaults.sampling()
        values["max_tokens"] = room if default_max_tokens is None else min(room, default_max_tokens)
        params = SamplingParams(**(values | dict(given)))
        if params.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens} after a prompt of {num_prompt_tokens} tokens, at most {room}: the "
                f"context has {self.model.max_model_len}",
                "max_tokens",
            )
        self._check_limits(params, num_prompt_tokens)
        params.check_vocabulary(self.model.vocab_size)
        return params

    @contextlib.asynccontextmanager
    async def running(self, jobs: Sequence[Job], origin: Origin) -> AsyncIterator[list[Generation]]:
        """Starts all jobs or none; on leaving, whatever still runs is stopped and all are released."""
        generations = await self.start(jobs, origin)
        try:
            yield generations
        finally:
            await self.end(generations)

    async def start(self, jobs: Sequence[Job], origin: Origin) -> list[Generation]:
        """Starts all jobs or none; the caller must `end` them. QueueFull, Unavailable, or what the engine says."""
        self._admit(len(jobs))
        self._starting.add(origin)
        started: list[Generation] = []
        try:
            for job in jobs:
                if job.params.grammar is not None:
                    await self.grammars.check(job.params.grammar, job.grammar_field)
            results = await asyncio.gather(*(self._start(job, origin, started) for job in jobs), return_exceptions=True)
            if failures := [result for result in results if isinstance(result, BaseException)]:
                raise failures[0]
        except BaseException:
            self._leave(len(jobs) - len(started))
            await self.end(started)
            raise
        finally:
            self._starting.discard(origin)
        origin.is_admitted = True
        return [result for result in results if isinstance(result, Generation)]

    async def end(self, generations: Sequence[Generation]) -> None:
        """Stops what still runs, releases all, also for a caller that is cancelled meanwhile. Idempotent."""
        ending = [generation for generation in generations if generation in self._running]
        if not ending:
            return
        self._running.difference_update(ending)
        work = asyncio.create_task(self._close(ending))
        self._closing.add(work)
        work.add_done_callback(self._closing.discard)
        await asyncio.shield(work)

    async def _close(self, ending: Sequence[Generation]) -> None:
        try:
            await asyncio.gather(*(generation.close() for generation in ending))
        finally:
            self._leave(len(ending))

    async def abort(self, request_id: str, caller: Caller) -> int:
        """Ends a request of this caller's (anybody's, for the admin) on behalf of another call than its own; returns
        how many choices that ended. Unknown, ended and foreign ids are all the same: 0.

        `request_id`: the name that came with it, or the id of its answer (or of one of its choices).
        """
        known = [origin for origin in self._starting if origin.name == request_id]
        for generation in self._running:
            if generation.origin.name == request_id or request_id.endswith(generation.handle.request_id):
                known.append(generation.origin)
        origins = {origin for origin in known if caller.may_end(origin.owner)} if request_id else set()
        for origin in origins:
            origin.is_aborted = True
        ending = [generation for generation in self._running if generation.origin in origins]
        await asyncio.gather(*(generation.stop() for generation in ending))
        return len(ending)

    async def drain(self, timeout: float) -> None:
        """Refuses what is new, waits for what runs, and after `timeout` seconds fails the rest."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0 and self._admitted:
            logger.info("draining: %d requests still run, %.0f s left", self._admitted, left)
            await self._wait_idle(min(left, DRAIN_LOG_S))
        if await self._wait_idle(0.0):
            return
        logger.warning("%d requests still ran after %g s and end unfinished", len(self._running), timeout)
        for generation in self._running:
            generation.fail(Unavailable("the server is shutting down"))
        await self._wait_idle(1.0)

    async def _wait_idle(self, timeout: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        return self._idle.is_set()

    async def _start(self, job: Job, origin: Origin, started: list[Generation]) -> Generation:
        handle = RequestHandle(uuid.uuid4().hex, self.model.name)
        stream = TextStream(job.tokenizer or self.tokenizer, job.params, job.continues, job.text)
        try:
            _, queue = await self.engine.astart_request(job.token_ids, job.params, handle.request_id, job.options)
        except BaseException:
            # Cancelled just as the engine said yes, the answer is lost; the name is not.
            self.engine.release_request(handle)
            raise
        record = self.telemetry.record(origin, handle.request_id, len(job.token_ids))
        generation = Generation(self.engine, handle, queue, stream, job.token_ids, origin, record)
        self._running.add(generation)
        started.append(generation)
        if origin.is_aborted:
            await generation.stop()
        return generation

    def _admit(self, count: int) -> None:
        if self._draining or self.hold:
            raise Unavailable(self.down_cause)
        if self._admitted + count > self._max_requests:
            raise QueueFull(
                f"{self._admitted} requests are running and {count} more were asked for, at most "
                f"{self._max_requests} at once; try again later"
            )
        self._admitted += count
        self._idle.clear()

    def _leave(self, count: int) -> None:
        self._admitted -= count
        if not self._admitted:
            self._idle.set()

    def _check_chars(self, chars: int, field: str) -> None:
        if chars > self.max_chars:
            raise InvalidRequest(f"{field} has {chars} characters, at most {self.max_chars}", field)

    def _check_limits(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """What this server allows of what any engine could do."""
        told = num_prompt_tokens * (1 + (params.prompt_logprobs or 0))
        if params.prompt_logprobs is not None and told > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs is {params.prompt_logprobs} for a prompt of {num_prompt_tokens} tokens, which are "
                f"{told} log-probabilities, at most {MAX_PROMPT_LOGPROBS}: ask for fewer, or of shorter prompts",
                "prompt_logprobs",
            )
        if len(params.stop) > self.limits.max_stop_sequences:
            raise InvalidRequest(
                f"stop has {len(params.stop)} entries, at most {self.limits.max_stop_sequences}", "stop"
            )
        for field in ("logprobs", "prompt_logprobs"):
            if (count := getattr(params, field) or 0) > self.limits.max_logprobs:
                raise InvalidRequest(f"{field} is {count}, must be from 0 to {self.limits.max_logprobs}", field)


def spread(job: Job, count: int) -> list[Job]:
    """`count` jobs of one prompt; a given seed goes up by one per choice, or all would be the same."""
    seed = job.params.seed
    if seed is None:
        return [job] * count
    return [replace(job, params=job.params.with_(seed=(seed + i) % 2**64)) for i in range(count)]


def caller_error(error: Exception, what: str) -> AllspanError:
    """The error as its caller may see it: a bug becomes InternalError with an id, and its traceback goes to the log."""
    if isinstance(error, AllspanError):
        return error
    name = f"incident-{uuid.uuid4().hex[:12]}"
    logger.error("%s: %s", name, what, exc_info=error)
    return InternalError(f"internal error; the server's log says more under {name}")
