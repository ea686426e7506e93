"""One epoch of a replica as its client sees it: a connection to each rank, their result streams, and their loss."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from allspan.client.cluster.fanout import RankRefused, fan_out, withdraw
from allspan.client.cluster.health import WorldHealth
from allspan.client.cluster.pacing import OutputPacer
from allspan.client.cluster.routing.knowledge import ReplicaKnowledge
from allspan.client.cluster.snapshot import RankView, ReplicaView
from allspan.client.cluster.state import ReplicaState, ReplicaStatus
from allspan.client.cluster.statistics import merged, rank_statistics
from allspan.client.transport.base import (
    CONTROL,
    INSPECT,
    LOAD_ADAPTER,
    RESEND_PAGES,
    RESULTS,
    STATUS,
    UNLOAD_ADAPTER,
    Connect,
    Transport,
)
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import AllspanError, DeadlineExceeded, Unavailable, from_code
from allspan.protos.cluster.cluster_file import ClusterInfo
from allspan.protos.convert import adapter_to_wire

HEARTBEAT_MS = 500
ASK_PAGES_S = 1.0
"""Seconds before a world is asked for all its pages, where page events were missed."""
MOST_ASKS = 10
"""Times that it is asked, until it tells them."""
ASKS = "ask for pages"
"""Name of the task that asks."""
WATCH_S = 0.1
"""Interval between two looks at which ranks are silent."""
GRACE_S = 5.0
"""The supervisor judges a silent rank after `watchdog_timeout`; this much later the client gives the rank up itself."""

logger = logging.getLogger(__name__)


class WorldLost(Exception):
    """A rank of the world is gone. Whether the ranks had taken what was sent is unknown, and does not matter."""


class Receiver(Protocol):
    """A request that runs in a world."""

    @property
    def work(self) -> int:
        """Tokens that the world has still to compute for it, estimated."""

    def deliver(self, message: pb.RequestOutput) -> None:
        """Takes what the leader has sent for it."""

    def lose(self) -> None:
        """Learns that its world is lost."""


class WorldClient:
    """The client of one world, made and used on one asyncio loop.

    `requests`: the requests that run in it, by the id that the ranks know them by.
    `lost`: the ranks that are gone, in the order of noticing, each with what was seen of it.
    `gone`: done once a rank is lost or the world is closed.
    """

    def __init__(
        self,
        info: ClusterInfo,
        connect: Connect,
        status: ReplicaStatus,
        is_over: Callable[[ClusterInfo], Awaitable[bool]],
        call_timeout: float,
        knowledge: ReplicaKnowledge,
    ) -> None:
        """`status` is CONNECTING; this world moves it while it is connected. `is_over`: whether the supervisor has
        given an epoch up; asked while a rank is silent, and answered within a second. `knowledge` hears the leader."""
        self.info = info
        self.client_id = uuid.uuid4().hex
        self.requests: dict[bytes, Receiver] = {}
        self.lost: dict[int, str] = {}
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._status = status
        self._is_over = is_over
        self._transports: list[Transport] = [connect(rank.address, info.tls) for rank in info.ranks]
        self._call_timeout = call_timeout
        self._knowledge = knowledge
        self._tasks: list[asyncio.Task[None]] = []
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first_messages = [asyncio.Event() for _ in info.ranks]
        self._health = WorldHealth(info)
        self._pacer = OutputPacer(self._deliver, asyncio.get_running_loop())

    async def open(self, timeout: float) -> None:
        """Checks that every rank is the expected one, and subscribes to all. Raises Unavailable, DeadlineExceeded."""
        for rank, status in enumerate(await self.statuses(timeout)):
            expected = (rank, len(self.info.ranks), self.info.epoch)
            found = (status.rank, status.world_size, status.epoch)
            if found != expected:
                address = self.info.ranks[rank].address
                raise Unavailable(f"{address} answers as (rank, of, epoch) {found}, expected {expected}")
        self._tasks = [asyncio.create_task(self._read(rank)) for rank in range(len(self._transports))]
        try:
            async with asyncio.timeout(timeout):
                for first in self._first_messages:
                    await first.wait()
        except TimeoutError:
            silent = [rank for rank, first in enumerate(self._first_messages) if not first.is_set()]
            name = self._health.describe(silent[0])
            raise DeadlineExceeded(f"{name} sent no heartbeat within {timeout:g} s") from None

    def begin(self) -> None:
        """Moves the replica's status to what the ranks say, and keeps it true from now on. Unavailable when a rank is
        gone already, or the replica has been closed meanwhile."""
        if self.lost:
            raise Unavailable(self.loss_report())
        if self._status.state is ReplicaState.CLOSED:
            raise Unavailable(self._status.cause)
        self._status.move(*self._health.assess())
        self._tasks.append(asyncio.create_task(self._watch()))

    async def view(self, replica: int, timeout: float) -> ReplicaView:
        """Returns the ranks' answers within `timeout` seconds."""
        calls = (rank.unary(STATUS, pb.StatusRequest(), timeout) for rank in self._transports)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        ranks, statuses = [], []
        for info, reply in zip(self.info.ranks, replies, strict=True):
            facts = None
            if isinstance(reply, pb.WorkerStatus):
                statuses.append(reply)
                facts = rank_statistics(reply, replica)
            ranks.append(RankView(info.rank, info.pid, info.host, self._health.age_s(info.rank), facts))
        whole = merged(statuses, replica) if len(statuses) == len(ranks) else None
        return ReplicaView(replica, self.info.epoch, self._status.cause, tuple(ranks), whole)

    async def start(self, message: pb.StartRequestMessage) -> None:
        """Sends a request to all ranks. Raises RankRefused, or WorldLost as soon as that or `leave` happens."""
        message.client_id = self.client_id
        message.epoch = self.info.epoch
        sending, left = asyncio.create_task(fan_out(self._transports, message, self._call_timeout)), self._left
        try:
            await asyncio.wait({sending, self.gone, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()  # of no effect once it is done
        refusal = sending.exception() if sending.done() and not sending.cancelled() else None
        if isinstance(refusal, RankRefused) and await self._is_dead(refusal):
            self.lose(refusal.rank, refusal.error.message)
        if self.gone.done() or left.done():
            raise WorldLost
        if refusal is not None:
            raise refusal

    async def stop(self, request_ids: Sequence[bytes]) -> bool:
        """Sends the leader a stop of these requests; their final outputs follow. False when the leader did not
        answer."""
        return await withdraw(self._transports[:1], request_ids, self._call_timeout)

    async def forget(self, request_ids: Sequence[bytes]) -> None:
        """Frees on the followers what the leader has ended, perhaps before it was ever planned."""
        await withdraw(self._transports[1:], request_ids, self._call_timeout)

    def leave(self) -> list[bytes]:
        """Has every request go on in another world, as if this one were lost. Returns the ids under which its ranks, if
        they still run, have them."""
        request_ids, requests = list(self.requests), list(self.requests.values())
        self._pacer.flush()
        self._left.set_result(None)
        self._left = asyncio.get_running_loop().create_future()
        for request in requests:
            request.lose()
        return request_ids

    async def statuses(self, timeout: float) -> list[pb.WorkerStatus]:
        """The status of every rank, in order of rank. Raises the first rank's failure to answer."""
        calls = (rank.unary(STATUS, pb.StatusRequest(), timeout) for rank in self._transports)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        found: list[pb.WorkerStatus] = []
        for rank, reply in enumerate(replies):
            if isinstance(reply, AllspanError):
                raise from_code(reply.code, f"{self._health.describe(rank)}: {reply.message}")
            if isinstance(reply, BaseException):
                raise reply
            found.append(reply)
        return found

    async def control(self, operation: str, timeout: float) -> None:
        """Runs an operation on the model (start, stop, unload …); the leader carries it to all ranks."""
        request = pb.ControlRequest(operation=operation, timeout_s=timeout)
        await self._transports[0].unary(CONTROL, request, timeout + self._call_timeout)

    async def load_adapter(self, adapter: AdapterModule, timeout: float) -> None:
        """Has all ranks load an adapter, or none; raises as `LiveAdapters.load`."""
        request = pb.LoadAdapterRequest(adapter=adapter_to_wire(adapter), timeout_s=timeout)
        reply = await self._transports[0].unary(LOAD_ADAPTER, request, timeout + self._call_timeout)
        self._hear(reply)

    async def unload_adapter(self, name: str, timeout: float) -> int:
        """Refuses new requests for an adapter, and returns the number of those that still have it. AdapterNotFound."""
        request = pb.UnloadAdapterRequest(name=name, timeout_s=timeout)
        reply = await self._transports[0].unary(UNLOAD_ADAPTER, request, timeout + self._call_timeout)
        self._hear(reply)
        return reply.num_requests

    async def inspect(self, what: str) -> dict[str, Any]:
        """The leader's answer; see `InspectRequest`."""
        reply = await self._transports[0].unary(INSPECT, pb.InspectRequest(what=what), self._call_timeout)
        answer: dict[str, Any] = json.loads(reply.json)
        return answer

    async def close(self) -> None:
        """Ends the lease: the ranks drop what is left of this client's requests."""
        self._end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(transport.close() for transport in self._transports), return_exceptions=True)

    def loss_report(self) -> str:
        """Returns the failures of the ranks that are gone, in the order in which this client noticed them."""
        return "; ".join(f"{self._health.describe(rank)} is gone: {seen}" for rank, seen in self.lost.items())

    def lose(self, rank: int, seen: str) -> None:
        """Notes that a rank is gone; the first one ends the world for all its requests."""
        is_closed = self.gone.done() and not self.lost
        if is_closed or rank in self.lost:
            return
        self._pacer.flush()
        self.lost[rank] = seen
        self._first_messages[rank].set()
        if len(self.lost) > 1:
            return
        self._end()
        if self._status.state.has_world:
            self._status.move(ReplicaState.LOST, self.loss_report())
        for request in list(self.requests.values()):
            request.lose()

    def _hear(self, reply: pb.AdapterReply) -> None:
        """Takes in the leader's adapters. Raises Unavailable where this world was lost meanwhile."""
        if self.gone.done():
            raise Unavailable(self.loss_report() or "the engine is closed")
        self._knowledge.adapters.hear(reply.adapters)

    def _end(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def _is_dead(self, refusal: RankRefused) -> bool:
        """Returns whether a call failed because the rank's process is gone, rather than by a refusal. One that is slow
        is not gone."""
        if not isinstance(refusal.error, Unavailable):
            return False
        try:
            await self._transports[refusal.rank].unary(STATUS, pb.StatusRequest(), 1.0)
        except AllspanError as error:
            return isinstance(error, Unavailable)
        return False

    async def _read(self, rank: int) -> None:
        """Reads the result stream of a rank until it ends, and hands each output to its request."""
        request = pb.ResultsSubscription(
            client_id=self.client_id,
            heartbeat_ms=HEARTBEAT_MS,
            page_events=self._knowledge.page_events if rank == 0 else 0,
        )
        try:
            async for message in self._transports[rank].stream(RESULTS, request):
                is_news = self._health.hear(rank)
                self._first_messages[rank].set()
                if rank == 0 and not self.gone.done():  # what is known then is of the next world
                    is_news |= self._health.note_leader(message.progress, message.refusal, bool(self.requests))
                    if not self._knowledge.hear(message, self.info.model):
                        self._ask_for_pages()
                if is_news:
                    self._update()
                if message.outputs:
                    self._pacer.put(message.outputs)
            seen = "it ended its stream"
        except AllspanError as error:
            seen = error.message
        except Exception as error:
            logger.exception("reading the results of %s failed", self._health.describe(rank))
            seen = f"its results could not be read: {error!r}"
        self.lose(rank, seen)

    def _ask_for_pages(self) -> None:
        """Has the leader asked to tell all its pages again, as page events were missed; one task at a time asks."""
        if not any(task.get_name() == ASKS and not task.done() for task in self._tasks):
            self._tasks.append(asyncio.create_task(self._ask_until_told(), name=ASKS))

    async def _ask_until_told(self) -> None:
        """Waits before each time, so that no fault makes snapshots without end. A leader that refuses `MOST_ASKS` times
        is of a version that cannot: nothing is known of its pages then."""
        request, refused = pb.ResendPagesRequest(client_id=self.client_id), ""
        for _ in range(MOST_ASKS):
            await asyncio.sleep(ASK_PAGES_S)
            if self._knowledge.is_told or self.gone.done():
                return
            try:
                await self._transports[0].unary(RESEND_PAGES, request, self._call_timeout)
            except AllspanError as error:
                refused = error.message
        if not self._knowledge.is_told:
            logger.warning("%s does not tell its pages again: %s", self._health.describe(0), refused or "no answer")

    def _deliver(self, output: pb.RequestOutput) -> None:
        """Hands an output to its request, if that still runs here."""
        if (receiver := self.requests.get(output.request_id)) is None:
            return
        try:
            receiver.deliver(output)
        except Exception as error:
            logger.exception("reading an output of %s failed", self._health.describe(0))
            self.lose(0, f"its results could not be read: {error!r}")

    def _update(self) -> None:
        """Moves the replica's status to what the ranks say, while this world is the connected one."""
        if self.gone.done() or not self._status.state.has_world:
            return
        state, cause = self._health.assess()
        if self._status.move(state, cause):
            level = logging.INFO if state is ReplicaState.READY else logging.WARNING
            logger.log(level, "%s", cause or "all ranks are heard, and the model takes requests")

    async def _watch(self) -> None:
        """A silent rank makes the replica SILENT and at last LOST. A step loop that stands still does not: it may be
        a very long step."""
        while not self.gone.done():
            before = time.monotonic()
            await asyncio.sleep(WATCH_S)
            if time.monotonic() - before > 10 * WATCH_S:
                self._health.reset()  # this process stood still (stopped, starved): it cannot judge the ranks
            elif (rank := self._health.longest_silent()) is not None:
                self._update()
                await self._judge(rank)

    async def _judge(self, rank: int) -> None:
        limit = self.info.watchdog_timeout + GRACE_S
        if self._health.age_s(rank) > limit:
            self.lose(rank, f"it sent nothing for {limit:g} s")
        elif await self._is_over(self.info):
            self.lose(rank, "it sent nothing more")
