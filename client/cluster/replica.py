"""One replica of a cluster: at most one connected world at a time, the cause of its loss, and reconnecting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from allspan.client.cluster.discovery import ClusterSource
from allspan.client.cluster.routing.knowledge import ReplicaKnowledge
from allspan.client.cluster.snapshot import RankView, ReplicaView
from allspan.client.cluster.state import ReplicaState, ReplicaStatus
from allspan.client.cluster.world import WorldClient
from allspan.client.transport.base import Connect
from allspan.protos.api.errors import AllspanError, DeadlineExceeded, Unavailable, from_code
from allspan.protos.cluster.cluster_file import ClusterInfo

OPEN_TIMEOUT_S = 10.0
CAUSE_TIMEOUT_S = 2.2
CAUSE_POLL_S = 0.02
RECONNECT_POLL_S = 0.25
TRY_ATTACH_S = 1.0
"""Most seconds that a caller waits for an attempt to attach that may well fail."""

logger = logging.getLogger(__name__)


class Replica:
    """A client's view of one replica, made and used on one asyncio loop.

    `status`: its state and the cause. `knowledge`: its pages and its load. `info`: the last world attached to.
    """

    def __init__(
        self,
        index: int,
        source: ClusterSource,
        connect: Connect,
        call_timeout: float,
        on_change: Callable[[], None],
        knowledge: ReplicaKnowledge,
    ) -> None:
        """`on_change`: see `ReplicaStatus`."""
        self.index = index
        self.status = ReplicaStatus(on_change)
        self.info: ClusterInfo | None = None
        self.knowledge = knowledge
        self._source = source
        self._connect = connect
        self._call_timeout = call_timeout
        self._world: WorldClient | None = None
        self._attaching = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def world(self) -> WorldClient | None:
        """The connected world, silent or not."""
        return self._world if self.status.state.has_world else None

    async def view(self, timeout: float) -> ReplicaView:
        """Returns the replica's state and statistics, as far as they are known within `timeout` seconds."""
        if (world := self.world) is not None:
            view = await world.view(self.index, timeout)
            if world is self.world:
                return view
        info = self.info
        ranks = tuple(RankView(rank.rank, rank.pid, rank.host) for rank in info.ranks) if info is not None else ()
        return ReplicaView(self.index, info.epoch if info is not None else 0, self.status.cause, ranks)

    def own_load(self) -> int:
        """Estimated number of tokens that its world has still to compute for this client."""
        world = self.world
        return sum(request.work for request in world.requests.values()) if world is not None else 0

    async def attach(self, answer_timeout: float = 0.0) -> None:
        """Waits for a world that is starting, without a limit; for ranks that do not answer, `answer_timeout` seconds.
        Raises ConfigError (nothing there), Unavailable or DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + answer_timeout
        while True:
            info: ClusterInfo | None = None
            try:
                info = await settled(self._source)
                if info.state == "ready":
                    async with self._attaching:
                        await self._adopt(info)
                    return
            except (DeadlineExceeded, Unavailable) as error:
                if loop.time() < deadline:
                    self.status.move(ReplicaState.DOWN, error.message)
                    logger.info("waiting for the ranks, %.0f s at most: %s", deadline - loop.time(), error.message)
                    await asyncio.sleep(RECONNECT_POLL_S)
                    continue
                # It may have died just now, which nobody has written down yet.
                later = await self._news_of(info) if info is not None else None
                if info is not None and later is not None and _is_over(info, later):
                    continue
                if answer_timeout:
                    raise _waited(error, answer_timeout) from None
                raise
            raise Unavailable(f"the cluster of {info.model} is {info.state}: {info.cause or 'no cause is known'}")

    async def try_attach(self) -> None:
        """Attaches to a world that is ready at this moment, without waiting for one."""
        try:
            async with asyncio.timeout(TRY_ATTACH_S):
                await self._attach_if_ready()
        except TimeoutError:
            logger.debug("replica %d cannot be attached to within %g s", self.index, TRY_ATTACH_S)

    async def has_successor(self) -> bool:
        """Returns whether its source tells of another world than the connected one, or that one will be started."""
        info = await self._read_quietly(TRY_ATTACH_S)
        if info is None or self.status.state is ReplicaState.CLOSED:
            return False
        if info.state == "ready":
            return self.world is None or self.world.info.epoch != info.epoch
        return info.state == "starting" or (info.state == "down" and info.will_restart)

    def keep(self) -> None:
        """Stays attached from now on, in the background: reconnects after every loss, and now if no world is
        attached."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())

    async def cause_known(self) -> None:
        """Waits until the cause of a loss has been looked up, a second or two."""
        await self.status.until_not(ReplicaState.LOST)

    async def close(self) -> None:
        """Ends the lease with its world. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self.status.move(ReplicaState.CLOSED, "the engine is closed")
        world, self._world = self._world, None
        if world is not None:
            await world.close()

    async def _keep(self) -> None:
        while True:
            if (world := self._world) is not None:
                await asyncio.wait([world.gone])
                await self._clean_up(world)
            while not await self._attach_if_ready():
                await asyncio.sleep(RECONNECT_POLL_S)

    async def _clean_up(self, world: WorldClient) -> None:
        """Handles a loss: finds the cause and whether another world follows, and closes the connections to this one."""
        self.knowledge.forget()
        info = await self._news_of(world.info)
        self._world = None
        self.status.move(_state_after(info), _cause_of(world, info))
        logger.info("%s", self.status.cause)
        await world.close()

    async def _news_of(self, info: ClusterInfo) -> ClusterInfo | None:
        """Returns the source's state once it reports that a world has ended, or its last state when that takes too
        long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CAUSE_TIMEOUT_S
        later: ClusterInfo | None = None
        while loop.time() < deadline:
            later = await self._read_quietly(deadline - loop.time())
            if later is not None and _is_over(info, later):
                break
            await asyncio.sleep(CAUSE_POLL_S)
        return later

    async def _read_quietly(self, timeout: float) -> ClusterInfo | None:
        """Returns the source's state; None when it cannot be read, which is expected while a world is down."""
        try:
            async with asyncio.timeout(max(timeout, 0.0)):
                return await self._source.read()
        except (AllspanError, TimeoutError) as error:
            logger.debug("the cluster cannot be read: %s", error)
        except Exception:
            logger.exception("reading the state of replica %d failed", self.index)
        return None

    async def _attach_if_ready(self) -> bool:
        """Returns whether it is attached now. A failure is no news while the cluster is down."""
        async with self._attaching:
            if not self._is_vacant:
                return self.status.state.has_world
            info = await self._read_quietly(OPEN_TIMEOUT_S)
            if not self._is_vacant:
                return False  # closed meanwhile
            if info is None or info.state != "ready":
                self.status.move(_state_after(info), (info.cause if info is not None else "") or None)
                return False
            try:
                await self._adopt(info)
            except AllspanError as error:
                logger.debug("cannot attach to epoch %d: %s", info.epoch, error)
                return False
            logger.info("attached to epoch %d of %s", info.epoch, info.model)
            return True

    @property
    def _is_vacant(self) -> bool:
        return self.status.state in (ReplicaState.DOWN, ReplicaState.STOPPED)

    async def _adopt(self, info: ClusterInfo) -> None:
        """Connects to a world that is said to be ready. Raises Unavailable, DeadlineExceeded."""
        before = self.status.state
        self.status.move(ReplicaState.CONNECTING)
        world = WorldClient(info, self._connect, self.status, self._is_given_up, self._call_timeout, self.knowledge)
        try:
            await world.open(OPEN_TIMEOUT_S)
            if await self._is_given_up(info):  # it may have answered late, across a network that was broken meanwhile
                raise Unavailable(f"epoch {info.epoch} is over")
            await self.knowledge.adapters.bring(world)
            world.begin()
        except BaseException:
            if self.status.state is ReplicaState.CONNECTING:
                self.status.move(before)
            self.knowledge.adapters.forget()
            await world.close()
            raise
        self._world = world
        self.info = info

    async def _is_given_up(self, info: ClusterInfo) -> bool:
        later = await self._read_quietly(TRY_ATTACH_S / 4)
        return later is not None and _is_over(info, later)


async def settled(source: ClusterSource) -> ClusterInfo:
    """Returns a source's state once no start is under way, or about to be."""
    while (info := await source.read()).state == "starting" or (info.state == "down" and info.will_restart):
        await asyncio.sleep(CAUSE_POLL_S)
    return info


def _waited(error: AllspanError, seconds: float) -> AllspanError:
    """The error with how long was waited, and how to wait longer."""
    waited = f"waited {seconds:g} s for the ranks to answer; startup_timeout=SECONDS gives them longer"
    return from_code(error.code, f"{error.message} ({waited})")


def _is_over(info: ClusterInfo, later: ClusterInfo) -> bool:
    """Returns whether a world that was ready has ended, according to a later state."""
    return later.epoch != info.epoch or later.state != "ready"


def _state_after(info: ClusterInfo | None) -> ReplicaState:
    """Returns the state after a loss: DOWN when the replica may have another world. One that nothing describes (a run
    directory that was removed, addresses where nobody answers) has no one who would start it again."""
    if info is None or info.state == "stopped" or (info.state == "down" and not info.will_restart):
        return ReplicaState.STOPPED
    return ReplicaState.DOWN


def _cause_of(world: WorldClient, info: ClusterInfo | None) -> str:
    """Returns the cause of a loss, the supervisor's where there is one: it has more information than a broken
    stream."""
    if info is not None and info.state == "stopped" and not info.cause:
        return f"the cluster of {info.model} was stopped"
    if info is None or not info.cause:
        return world.loss_report()
    is_named = any(f"rank {rank}" in info.cause for rank in world.lost)
    return info.cause if is_named else f"{info.cause} ({world.loss_report()})"
