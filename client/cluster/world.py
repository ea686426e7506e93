"""One attached world (an epoch of a cluster): connections to its ranks, their streams, and whether it still lives."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from allspan.client.cluster.fanout import RankRefused, fan_out, withdraw
from allspan.client.cluster.snapshot import RankView, ReplicaView
from allspan.client.cluster.statistics import merged, rank_statistics
from allspan.client.transport.base import CONTROL, INSPECT, RESULTS, STATUS, Connect, Transport
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import AllspanError, DeadlineExceeded, Unavailable, from_code
from allspan.protos.cluster.cluster_file import ClusterInfo

HEARTBEAT_MS = 500
QUIET_S = 1.5
"""A rank that sends nothing for so long is not ready; with WATCH_S, that is known within two seconds."""
WATCH_S = 0.25
GRACE_S = 5.0
"""A rank that is silent is the supervisor's to judge, after `watchdog_timeout`; so much later it is given up here."""
STALL_S = 10.0
"""A step loop that has work and does not advance for so long is not ready."""

logger = logging.getLogger(__name__)


class WorldLost(Exception):
    """The world is gone; whether it had taken what was sent is unknown, and of no more consequence."""


class WorldEvents(Protocol):
    """Who is told what becomes of a world."""

    def on_output(self, world: World, message: pb.RequestOutput) -> None:
        """The leader has sent something for a request."""

    def on_lost(self, world: World) -> None:
        """A rank is gone; called once."""

    def on_change(self) -> None:
        """A rank has fallen silent, or is heard again."""

    def is_busy(self) -> bool:
        """Whether any request is open (an idle step loop may stand still)."""

    async def is_over(self, world: World) -> bool:
        """Whether the supervisor has given the world up; asked while a rank is silent, and answered soon."""


class World:
    """Lives on one asyncio loop.

    `lost` maps the ranks that are gone to what was seen of it, in the order of seeing; `gone` is done with the first.
    """

    def __init__(self, info: ClusterInfo, connect: Connect, events: WorldEvents, call_timeout: float) -> None:
        self.info = info
        self.client_id = uuid.uuid4().hex
        self.lost: dict[int, str] = {}
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transports: list[Transport] = [connect(rank.address, info.tls) for rank in info.ranks]
        self._events = events
        self._call_timeout = call_timeout
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        now = time.monotonic()
        self._last_message = [now] * len(info.ranks)
        self._quiet: set[int] = set()
        self._first_messages = [asyncio.Event() for _ in info.ranks]
        self._progress = (0, now)
        self._stall = ""
        self._refusal = ""

    async def open(self, timeout: float) -> None:
        """Checks that every rank is the one expected, and subscribes to all. Raises Unavailable, DeadlineExceeded."""
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
            raise DeadlineExceeded(f"{self.describe(silent[0])} sent no heartbeat within {timeout:g} s") from None
        if self.lost:
            raise Unavailable(self.obituary())
        self._tasks.append(asyncio.create_task(self._watch()))

    @property
    def silence(self) -> str:
        """Which rank has not been heard for QUIET_S; "" while all are."""
        if not (quiet := sorted(self._quiet)):
            return ""
        seconds = time.monotonic() - self._last_message[quiet[0]]
        return f"{self.describe(quiet[0])} has been silent for {seconds:.1f} s"

    @property
    def refusal(self) -> str:
        """Why requests are not welcome though all ranks are heard: the leader lets none in, or its loop hangs."""
        return self._stall or self._refusal

    async def view(self, replica: int, timeout: float) -> ReplicaView:
        """What is known of it within `timeout` seconds."""
        calls = (rank.unary(STATUS, pb.StatusRequest(), timeout) for rank in self._transports)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        now, ranks, statuses = time.monotonic(), [], []
        for info, reply, last in zip(self.info.ranks, replies, self._last_message, strict=True):
            told = None
            if isinstance(reply, pb.WorkerStatus):
                statuses.append(reply)
                told = rank_statistics(reply, replica)
            ranks.append(RankView(info.rank, info.pid, info.host, now - last, told))
        whole = merged(statuses, replica) if len(statuses) == len(ranks) else None
        return ReplicaView(replica, self.info.epoch, self.silence or self.refusal, tuple(ranks), whole)

    async def start(self, message: pb.StartRequestMessage) -> None:
        """Fans a request out. Raises RankRefused, or WorldLost as soon as that happens."""
        message.client_id = self.client_id
        message.epoch = self.info.epoch
        sending = asyncio.create_task(fan_out(self._transports, message, self._call_timeout))
        try:
            await asyncio.wait({sending, self.gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()  # of no effect once it is done
        refusal = sending.exception() if sending.done() and not sending.cancelled() else None
        if isinstance(refusal, RankRefused) and await self._is_dead(refusal):
            self.lose(refusal.rank, refusal.error.message)
        if self.gone.done():
            raise WorldLost
        if refusal is not None:
            raise refusal

    async def stop(self, request_ids: Sequence[bytes]) -> bool:
        """Asks the leader to end requests; their final outputs follow. False if it has not heard."""
        return await withdraw(self._transports[:1], request_ids, self._call_timeout)

    async def forget(self, request_ids: Sequence[bytes]) -> None:
        """Frees on the followers what the leader has ended, perhaps before it was ever planned."""
        await withdraw(self._transports[1:], request_ids, self._call_timeout)

    async def statuses(self, timeout: float) -> list[pb.WorkerStatus]:
        """Every rank's, in order of rank."""
        calls = (rank.unary(STATUS, pb.StatusRequest(), timeout) for rank in self._transports)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        found: list[pb.WorkerStatus] = []
        for rank, reply in enumerate(replies):
            if isinstance(reply, AllspanError):
                raise from_code(reply.code, f"{self.describe(rank)}: {reply.message}")
            if isinstance(reply, BaseException):
                raise reply
            found.append(reply)
        return found

    async def control(self, operation: str, timeout: float) -> None:
        """An operation of the model's life cycle, on the leader, which carries it to all."""
        request = pb.ControlRequest(operation=operation, timeout_s=timeout)
        await self._transports[0].unary(CONTROL, request, timeout + self._call_timeout)

    async def inspect(self, what: str) -> dict[str, Any]:
        """The leader's answer; see `InspectRequest`."""
        reply = await self._transports[0].unary(INSPECT, pb.InspectRequest(what=what), self._call_timeout)
        answer: dict[str, Any] = json.loads(reply.json)
        return answer

    async def close(self) -> None:
        """Ends the lease: the ranks drop what is left of this client's requests."""
        self._closed = True
        self._end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(transport.close() for transport in self._transports), return_exceptions=True)

    def describe(self, rank: int) -> str:
        info = self.info.ranks[rank]
        return f"rank {rank} (pid {info.pid} on {info.host or 'an unknown host'})"

    def obituary(self) -> str:
        """What this side saw of the ranks that are gone, in the order of seeing."""
        return "; ".join(f"{self.describe(rank)} is gone: {seen}" for rank, seen in self.lost.items())

    def lose(self, rank: int, seen: str) -> None:
        """Notes that a rank is gone; the first one ends the world."""
        if self._closed or rank in self.lost:
            return
        self.lost[rank] = seen
        self._first_messages[rank].set()
        if len(self.lost) == 1:
            self._end()
            self._events.on_lost(self)

    def _end(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def _is_dead(self, refusal: RankRefused) -> bool:
        """Whether a rank refused because nobody is there, rather than by saying no. One that is slow is not gone."""
        if not isinstance(refusal.error, Unavailable):
            return False
        try:
            await self._transports[refusal.rank].unary(STATUS, pb.StatusRequest(), 1.0)
        except AllspanError as error:
            return isinstance(error, Unavailable)
        return False

    async def _read(self, rank: int) -> None:
        request = pb.ResultsSubscription(client_id=self.client_id, heartbeat_ms=HEARTBEAT_MS)
        try:
            async for message in self._transports[rank].stream(RESULTS, request):
                self._hear(rank)
                if rank == 0:
                    self._note_progress(message.progress)
                    self._note_refusal(message.refusal)
                for output in message.outputs:
                    self._events.on_output(self, output)
            seen = "it ended its stream"
        except AllspanError as error:
            seen = error.message
        except Exception as error:
            logger.exception("reading the results of %s failed", self.describe(rank))
            seen = f"its results could not be read: {error!r}"
        self.lose(rank, seen)

    def _hear(self, rank: int) -> None:
        self._last_message[rank] = time.monotonic()
        self._first_messages[rank].set()
        if rank in self._quiet:
            self._quiet.remove(rank)
            logger.info("%s is heard again", self.describe(rank))
            self._events.on_change()

    async def _watch(self) -> None:
        """Silence is no readiness, and at last death. A step loop that stands still is only logged: it may be a very
        long step."""
        while not self.lost:
            before = time.monotonic()
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if now - before > 4 * WATCH_S:
                # It is this process that stood still (stopped, starved): it has not listened, so it cannot judge.
                self._last_message = [now] * len(self._last_message)
            elif silent := {rank for rank, last in enumerate(self._last_message) if now - last > QUIET_S}:
                await self._judge(silent, now)

    async def _judge(self, silent: set[int], now: float) -> None:
        if silent - self._quiet:
            self._quiet |= silent
            logger.warning("%s", self.silence)
            self._events.on_change()
        limit = self.info.watchdog_timeout + GRACE_S
        rank = min(silent, key=lambda rank: self._last_message[rank])
        if now - self._last_message[rank] > limit:
            self.lose(rank, f"it sent nothing for {limit:g} s")
        elif await self._events.is_over(self):
            self.lose(rank, "it sent nothing more")

    def _note_progress(self, progress: int) -> None:
        last, since = self._progress
        now = time.monotonic()
        if progress != last or not self._events.is_busy():
            self._progress = (progress, now)
            if self._stall:
                self._stall = ""
                self._events.on_change()
        elif now - since > STALL_S and not self._stall:
            self._stall = f"the step loop of {self.describe(0)} has work and has not advanced for {STALL_S:g} s"
            logger.warning("%s", self._stall)
            self._events.on_change()

    def _note_refusal(self, refusal: str) -> None:
        if refusal != self._refusal:
            self._refusal = refusal
            self._events.on_change()
