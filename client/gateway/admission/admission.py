"""Admission shared by HTTP and gRPC: starts requests within a limit, and ends what its caller leaves."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from allspan.client.gateway.admission.active_request import ActiveRequest
from allspan.client.gateway.admission.grammar_check import GrammarCheck
from allspan.client.gateway.auth.caller import Caller, cache_salt
from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.engine_protocol import GatewayEngine
from allspan.client.gateway.served_model import ServedModel
from allspan.client.gateway.telemetry.recorder import Telemetry
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos.api.errors import AllspanError, InternalError, QueueFull, Unavailable
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import RequestHandle
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.text import Tokenizer
from allspan.protos.text.stream.text_stream import PLAIN_TEXT, TextOptions, TextStream

RETRY_AFTER_S = 1
"""Seconds in the Retry-After of a request that was refused for lack of room."""
DRAIN_LOG_S = 5.0

logger = logging.getLogger("allspan.gateway")


@dataclass(frozen=True)
class Job:
    """One prompt with its sampling parameters and options."""

    token_ids: Sequence[int]
    params: SamplingParams
    continues: bool = True
    """Whether the output continues the prompt's text, rather than being an answer of its own."""
    options: RequestOptions | None = None
    text: TextOptions = PLAIN_TEXT
    tokenizer: Tokenizer | None = None
    """Makes the output's text; None: the gateway's."""
    grammar_field: str = "grammar"
    """The request's field that `params.grammar` comes from."""


class Hold(enum.Enum):
    """The operator's reason for taking no requests; the value is the text for callers."""

    NONE = ""
    PAUSED = "the server is paused by its operator; POST /resume lets requests in again"
    ASLEEP = "the server sleeps, its weights are unloaded; POST /wake_up loads them again"


class Admission:
    """Counts the requests that run, refuses more than the limit, and drains when the server ends.

    `hold`: whether the operator lets requests in. `share_prefixes`: whether callers with different keys share cached
    pages.
    """

    def __init__(
        self,
        engine: GatewayEngine,
        tokenizer: Tokenizer,
        model: ServedModel,
        limits: LimitsConfig,
        telemetry: Telemetry,
        share_prefixes: bool,
    ) -> None:
        self.hold = Hold.NONE
        self.grammars = GrammarCheck(tokenizer, model.vocab_size, limits)
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = model
        self._telemetry = telemetry
        self._share_prefixes = share_prefixes
        self._max_requests = limits.max_concurrent_requests
        self._admitted = 0
        self._running: set[ActiveRequest] = set()
        self._starting: set[Origin] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

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
        """The reason why new requests are not taken, "" while they are."""
        return "the server is shutting down" if self._draining else self.hold.value or self._engine.down_cause

    def running_requests(self) -> list[ActiveRequest]:
        """The requests that run now."""
        return list(self._running)

    @contextlib.asynccontextmanager
    async def running(self, jobs: Sequence[Job], origin: Origin) -> AsyncIterator[list[ActiveRequest]]:
        """Starts all jobs or none; on leaving, whatever still runs is stopped and all are released."""
        requests = await self.start(jobs, origin)
        try:
            yield requests
        finally:
            await self.end(requests)

    async def start(self, jobs: Sequence[Job], origin: Origin) -> list[ActiveRequest]:
        """Starts all jobs or none; the caller must `end` them. QueueFull, Unavailable, or what the engine says."""
        if any(job.options is None or not job.options.pooling for job in jobs):
            self._model.check_generates()
        self._admit(len(jobs))
        self._starting.add(origin)
        started: list[ActiveRequest] = []
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
        return [result for result in results if isinstance(result, ActiveRequest)]

    async def end(self, requests: Sequence[ActiveRequest]) -> None:
        """Stops what still runs, releases all, also for a caller that is cancelled meanwhile. Idempotent."""
        ending = [request for request in requests if request in self._running]
        if not ending:
            return
        self._running.difference_update(ending)
        work = asyncio.create_task(self._close(ending))
        self._closing.add(work)
        work.add_done_callback(self._closing.discard)
        await asyncio.shield(work)

    async def _close(self, ending: Sequence[ActiveRequest]) -> None:
        try:
            await asyncio.gather(*(request.close() for request in ending))
        finally:
            self._leave(len(ending))

    async def abort(self, request_id: str, caller: Caller) -> int:
        """Ends a request of this caller (of any caller, for the admin) on behalf of another call than its own; returns
        the number of choices that it ended. Unknown, ended and foreign ids are all the same: 0.

        `request_id`: the name that came with it, or the id of its answer (or of one of its choices).
        """
        known = [origin for origin in self._starting if origin.name == request_id]
        for request in self._running:
            if request.origin.name == request_id or request_id.endswith(request.handle.request_id):
                known.append(request.origin)
        origins = {origin for origin in known if caller.may_end(origin.owner)} if request_id else set()
        for origin in origins:
            origin.is_aborted = True
        ending = [request for request in self._running if request.origin in origins]
        await asyncio.gather(*(request.stop() for request in ending))
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
        for request in self._running:
            request.fail(Unavailable("the server is shutting down"))
        await self._wait_idle(1.0)

    async def _wait_idle(self, timeout: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        return self._idle.is_set()

    async def _start(self, job: Job, origin: Origin, started: list[ActiveRequest]) -> ActiveRequest:
        handle = RequestHandle(uuid.uuid4().hex, self._model.answered(job.options))
        stream = TextStream(job.tokenizer or self._tokenizer, job.params, job.continues, job.text)
        try:
            options = self._options(job, origin)
            _, queue = await self._engine.astart_request(job.token_ids, job.params, handle.request_id, options)
        except BaseException:
            # Cancelled just as the engine said yes, the answer is lost; the name is not.
            self._engine.release_request(handle)
            raise
        record = self._telemetry.record(origin, handle, len(job.token_ids))
        request = ActiveRequest(self._engine, handle, queue, stream, job.token_ids, origin, record)
        self._running.add(request)
        started.append(request)
        if origin.is_aborted:
            await request.stop()
        return request

    def _options(self, job: Job, origin: Origin) -> RequestOptions | None:
        """Returns the job's options, with the salt of its caller's key: cached tokens of another key's prompts would
        tell, exactly, how such a prompt begins."""
        if self._share_prefixes or not origin.cache_key:
            return job.options
        options = job.options or RequestOptions()
        return replace(options, cache_salt=cache_salt(origin.cache_key, options.cache_salt))

    def _admit(self, count: int) -> None:
        if self._draining or self.hold is not Hold.NONE:
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


def jobs_per_choice(job: Job, count: int) -> list[Job]:
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
