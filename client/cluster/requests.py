"""A client's open requests: admission to a replica, and requeueing in another world when theirs is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from allspan.client.cluster.discovery import ClusterSource
from allspan.client.cluster.fanout import RankRefused
from allspan.client.cluster.replica import Replica
from allspan.client.cluster.request import OpenRequest
from allspan.client.cluster.router import Router
from allspan.client.cluster.snapshot import ClusterView
from allspan.client.cluster.state import ReplicaState
from allspan.client.cluster.world import WorldClient, WorldLost
from allspan.client.transport.base import Connect
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import find_adapter, lost_adapter
from allspan.protos.api.engine import EngineStatistics
from allspan.protos.api.errors import (
    AllspanError,
    AlreadyExists,
    ConfigError,
    InternalError,
    QueueFull,
    RequestCancelled,
    Unavailable,
)
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.cluster_file import ClusterInfo

CALL_TIMEOUT_S = 45.0
"""Seconds of a call to a rank, longer than a rank may be silent before its world is lost: such a call ends with the
loss."""
FIRST_RETRY_S = 0.02
LAST_RETRY_S = 0.5
MAX_STOP_CALLS = 3
FINAL_OUTPUT_S = 1.0
"""A leader that has stopped a request has sent its final output by then."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """The handling of unfinished requests when their world is lost."""

    enabled: bool = True
    timeout_s: float = 30.0
    """Seconds that a request waits for a world to continue in."""
    max_tries: int = 5
    """Attempts in a row that may be lost without bringing a token."""

    def __post_init__(self) -> None:
        if not 0 <= self.timeout_s <= 86400:
            raise ConfigError(f"resume_timeout is {self.timeout_s}, must be from 0 to 86400 seconds")
        if self.max_tries < 1:
            raise ConfigError(f"max_resumes is {self.max_tries}, must be at least 1; resume=False for none")


class Session:
    """All requests of one client and their worlds, made and used on one asyncio loop. `sources`: see `Router`."""

    def __init__(
        self,
        sources: Sequence[ClusterSource],
        connect: Connect,
        policy: ResumePolicy | None = None,
        call_timeout: float = CALL_TIMEOUT_S,
    ) -> None:
        self._policy = policy or ResumePolicy()
        self._call_timeout = call_timeout
        self.router = Router(sources, connect, call_timeout, self._leave_silent)
        self._open: dict[bytes, OpenRequest] = {}
        self._closed = False
        self._background: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> ClusterInfo | None:
        """The cluster, as of a world that was attached to."""
        return self.router.info

    @property
    def down_cause(self) -> str:
        """The reason why requests are refused; "" while they are taken."""
        return self.router.down_cause

    @property
    def unready_cause(self) -> str:
        """The reason why no replica is READY: `down_cause`, a stopped model, a step loop that makes no progress; ""
        while one is."""
        return self.router.unready_cause

    def page_events(self) -> list[AsyncGenerator[pb.PageEvents, None]]:
        """Returns the page events of each replica; see `page_events`."""
        return self.router.page_events()

    async def attach(self, timeout: float, answer_timeout: float = 0.0) -> None:
        """See `Router.attach`."""
        await self.router.attach(timeout, answer_timeout)

    async def start(
        self,
        request_id: bytes,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
    ) -> ResultQueue:
        """Admits a request on every rank of a replica. Cancelling this leaves no request behind."""
        if self._closed:
            raise Unavailable("the engine is closed")
        await self.router.some_ready()
        if request_id in self._open:
            raise AlreadyExists(f"request_id is {request_id.hex()}, which is in use; release that request first")
        adapter = find_adapter(options.adapter if options else "", self.router.adapters.listed())
        request = self._open[request_id] = OpenRequest(request_id, prompt_ids, params, options, self, adapter)
        admission = request.retry_task = self._spawn(self._first_attempt(request))
        try:
            await asyncio.wait([admission])
        except asyncio.CancelledError:
            self.release(request_id)
            raise
        if admission.cancelled():
            raise Unavailable("the engine is closed")
        admission.result()
        return request.queue

    async def stop(self, request_id: bytes) -> None:
        """Ends a request early; its final output arrives by itself. Unknown and ended ones are left alone."""
        request = self._open.get(request_id)
        if request is not None:
            request.is_stopping = True
            if request.is_admitting:
                pass  # the task that sends it stops it, as soon as it has arrived
            elif (attempt := request.attempt) is not None and attempt.is_open:
                await attempt.world.stop([attempt.wire_id])
            else:
                request.output.cancel()
                self._drop(request)

    def release(self, request_id: bytes) -> None:
        """Ends a request for its reader at once, and for the ranks in the background."""
        request = self._open.get(request_id)
        if request is not None:
            request.output.cancel()
            if not request.is_stopping:
                self._spawn(self.stop(request_id))

    def queues(self, request_id: bytes | None = None) -> list[ResultQueue]:
        """The queue of one open request (none when it has ended), or those of all."""
        found = self._open.values() if request_id is None else filter(None, [self._open.get(request_id)])
        return [request.queue for request in found]

    async def outlast(self) -> None:
        """Waits until requests are taken again, for a caller whose earlier ones are being resumed meanwhile. Raises
        Unavailable when they will not be."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._policy.timeout_s
        while self.router.down_cause:
            if not (self._policy.enabled and self.router.may_return and loop.time() < deadline):
                raise Unavailable(self.router.down_cause)
            await self.router.news(deadline - loop.time())

    async def statistics(self) -> EngineStatistics:
        return await self.router.statistics()

    async def view(self, timeout: float) -> ClusterView:
        """Returns the cluster's state and statistics, up or not, as far as they are known within `timeout` seconds."""
        return await self.router.view(timeout)

    async def control(self, operation: str, timeout: float) -> None:
        await self.router.control(operation, timeout)

    async def inspect(self, what: str) -> dict[str, Any]:
        return await self.router.inspect(what)

    async def close(self) -> None:
        """Ends every request with RequestCancelled, and the leases with the ranks. Idempotent."""
        self._closed = True
        for request in list(self._open.values()):
            request.queue.fail(RequestCancelled("the engine was closed"))
            self._drop(request)
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.router.close()

    def finished(self, request: OpenRequest, reason: str) -> None:
        attempt = request.attempt
        if attempt is not None and reason not in ("stop", "length"):
            self._spawn(attempt.world.forget([attempt.wire_id]))
        self._end(request)

    def failed(self, request: OpenRequest, error: AllspanError) -> None:
        if isinstance(error, Unavailable) and self._policy.enabled:
            request.lose()  # its world is ending, and has said so before its streams did
            return
        request.queue.fail(error)
        if (attempt := request.attempt) is not None:
            self._spawn(attempt.world.forget([attempt.wire_id]))
        self._end(request)

    def lost(self, request: OpenRequest) -> None:
        if not request.is_admitting:
            request.retry_task = self._spawn(self._requeue(request))

    def _leave_silent(self) -> None:
        """Has the requests of silent worlds go on in others where there are such: the host may be off or cut off, which
        breaks no connection. Ranks that are heard again must not go on with them."""
        if self._policy.enabled and any(replica.status.state is ReplicaState.READY for replica in self.router.replicas):
            for world in self.router.silent:
                if world.requests:
                    self._spawn(self._stop_left(world, world.leave()))

    async def _stop_left(self, world: WorldClient, request_ids: list[bytes]) -> None:
        if await world.stop(request_ids):
            await asyncio.sleep(FINAL_OUTPUT_S)  # a follower may drop only what the leader has dropped
            await world.forget(request_ids)

    def _end(self, request: OpenRequest) -> None:
        if request.replica is not None:
            self.router.ended(request.replica, request)
        self._drop(request)

    async def _first_attempt(self, request: OpenRequest) -> None:
        try:
            try:
                await self._admit(request)
            except Unavailable:
                if request.losses:
                    await self._next_attempt(request)
                elif not await self.router.is_changing():
                    await self.router.some_ready()  # reports a world that was lost just now with its cause
                    raise
                else:
                    await self._go_on(request)
        except AllspanError:
            if request.world is None:
                self._drop(request)
            raise

    async def _requeue(self, request: OpenRequest) -> None:
        try:
            await self._next_attempt(request)
        except AllspanError as error:
            failure = error
        except Exception as error:
            logger.exception("request %s could not be resumed", request.request_id.hex())
            failure = InternalError(f"the request could not be resumed: {error!r}")
        else:
            return
        request.queue.fail(failure)
        if request.world is None:  # else its leader may have it, and is being asked
            self._drop(request)

    async def _next_attempt(self, request: OpenRequest) -> None:
        """Sends a request that has lost its world to another, as soon as there is one; raises why there is none."""
        last = request.replica
        info = last.info if last is not None else None
        if last is None or info is None:
            raise InternalError("a request that was never sent cannot be resumed")
        if request.finish(info):
            self._drop(request)
            return
        if not self._policy.enabled:
            await last.cause_known()
            raise Unavailable(last.status.down_cause or "the world has failed")
        await self._go_on(request)

    async def _go_on(self, request: OpenRequest) -> None:
        """Sends a request to a replica as soon as one takes it; raises why none does. Its caller may stop it."""
        if not await self._retry(request):
            request.output.cancel()
            self._drop(request)

    async def _retry(self, request: OpenRequest) -> bool:
        """Makes attempts until a replica takes the request; False when its caller has stopped it meanwhile. Raises why
        there is no world."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._policy.timeout_s
        pause = FIRST_RETRY_S
        while not request.is_stopping:
            request.check_time()
            await self._check_losses(request)
            try:
                await self._admit(request)
                return True
            except (AlreadyExists, QueueFull, Unavailable) as refusal:
                cause = self.router.down_cause or refusal.message
            if not self.router.may_return:
                raise Unavailable(cause)
            if loop.time() >= deadline:
                raise Unavailable(f"{cause} (nothing to go on in within {self._policy.timeout_s:g} s)")
            left = min(left for left in (deadline - loop.time(), request.remaining_s) if left is not None)
            if self.router.ready:
                await asyncio.sleep(max(min(pause, left), 0.0))
                pause = min(2 * pause, LAST_RETRY_S)
            else:
                await self.router.news(left)
        return False

    async def _check_losses(self, request: OpenRequest) -> None:
        """Raises Unavailable once too many attempts were lost: the request may be what kills the ranks."""
        if request.losses > self._policy.max_tries and request.replica is not None:
            await request.replica.cause_known()
            cause = request.replica.status.down_cause or "the world has failed"
            raise Unavailable(f"{cause} ({request.losses} worlds in a row were lost without a token of this request)")

    async def _admit(self, request: OpenRequest) -> None:
        """Sends it to the best replica that takes it. Raises the last one's refusal."""
        refusal: AllspanError | None = None
        lost: AllspanError | None = None
        for replica, hit_tokens in self.router.ranked(request):
            if (world := replica.world) is None:
                continue
            if not replica.knowledge.adapters.has(request.adapter):
                lost = self._without_adapter(request)
                continue
            try:
                await self._send(request, replica, world, hit_tokens)
                return
            except (AlreadyExists, QueueFull, Unavailable) as error:
                refusal = error
        raise refusal or lost or Unavailable(self.router.down_cause or "no replica takes requests")

    def _without_adapter(self, request: OpenRequest) -> AllspanError:
        """Why a replica is passed over; one that returns with the adapter is worth waiting for."""
        name = request.options.adapter
        if self.router.may_bring(request.adapter):
            return Unavailable(f"no replica that is up has the adapter {name!r}, one that may return does")
        return lost_adapter(name)

    async def _send(self, request: OpenRequest, replica: Replica, world: WorldClient, hit_tokens: int) -> None:
        """Begins an attempt. Raises the ranks' refusal; Unavailable when the world was lost meanwhile."""
        message = request.begin(replica, world, hit_tokens)
        self.router.sent(replica, request)
        request.is_admitting = True
        try:
            await world.start(message)
        except WorldLost:
            if request.world is world:
                request.lose()
        except RankRefused as refusal:
            if refusal.ambiguous:
                request.is_stopping = True
                self._spawn(self._stop_unanswered(request))
            else:
                request.leave()
            raise refusal.error from None
        finally:
            request.is_admitting = False
        if request.world is None and not request.is_over:
            raise Unavailable(replica.status.down_cause or "the world has failed")
        if request.is_stopping:
            self._spawn(self.stop(request.request_id))

    async def _stop_unanswered(self, request: OpenRequest) -> None:
        """Ends a request whose start the leader did not answer, so that it may have it: by its final output; or, if the
        leader never had it, when it answers a stop and sends no output; or after MAX_STOP_CALLS, and then with the
        lease."""
        attempt = request.attempt
        assert attempt is not None  # it was being sent
        for _ in range(MAX_STOP_CALLS):
            await asyncio.sleep(self._call_timeout)
            if not attempt.is_open:
                return
            if await attempt.world.stop([attempt.wire_id]):
                await asyncio.sleep(FINAL_OUTPUT_S)
                if attempt.is_open:
                    await attempt.world.forget([attempt.wire_id])
                break
        if attempt.is_open:
            self._drop(request)

    def _drop(self, request: OpenRequest) -> None:
        """Forgets a request that is over, for this client at least."""
        if self._open.get(request.request_id) is request:
            del self._open[request.request_id]
        request.leave()
        task = request.retry_task
        if task is not None and not request.is_admitting and task is not asyncio.current_task():
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, AllspanError):
            logger.error("a task of the session failed", exc_info=error)
