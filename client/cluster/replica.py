"""One replica of a cluster, as a facade sees it: at most one world at a time, its loss, and attaching to the next."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from allspan.client.cluster.affinity import PrefixIndex
from allspan.client.cluster.discovery import ClusterSource
from allspan.client.cluster.request import OpenRequest
from allspan.client.cluster.snapshot import RankView, ReplicaView
from allspan.client.cluster.world import World
from allspan.client.transport.base import Connect
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import AllspanError, DeadlineExceeded, Unavailable
from allspan.protos.cluster.cluster_file import ClusterInfo

OPEN_TIMEOUT_S = 10.0
CAUSE_TIMEOUT_S = 2.2
CAUSE_POLL_S = 0.02
REVIVE_POLL_S = 0.25
GLANCE_S = 1.0
"""How long a caller waits for an attempt to attach that nothing has promised."""

logger = logging.getLogger(__name__)


class Holder(Protocol):
    """Who holds the replicas, and the requests that run on them."""

    def on_output(self, replica: Replica, message: pb.RequestOutput) -> None:
        """Its world has sent something for a request that runs there."""

    def on_lost(self, replica: Replica) -> None:
        """Its world is gone, just now; `replica.requests` ran there."""

    def on_change(self) -> None:
        """A replica has become ready, or is no more, or it is known whether it will be again."""


class Replica:
    """Lives on one asyncio loop. `requests`: those whose present life is here, by their wire ids; `prefixes`: what its
    cache may hold.

    `info`: of the last world attached to. `may_return`: whether another world may follow the one that is gone; assumed
    until it is known.
    """

    def __init__(
        self, index: int, source: ClusterSource, connect: Connect, holder: Holder, call_timeout: float
    ) -> None:
        self.index = index
        self.info: ClusterInfo | None = None
        self.requests: dict[bytes, OpenRequest] = {}
        self.prefixes = PrefixIndex()
        self.may_return = True
        self._source = source
        self._connect = connect
        self._holder = holder
        self._call_timeout = call_timeout
        self._world: World | None = None
        self._down = "not attached to a cluster"
        self._attaching = asyncio.Lock()
        self._burial: asyncio.Task[None] | None = None
        self._revival: asyncio.Task[None] | None = None

    @property
    def world(self) -> World | None:
        """The world that lives now, silent or not."""
        return self._world if self._world is not None and not self._world.lost else None

    @property
    def down_cause(self) -> str:
        """Why it takes no requests; "" while it does."""
        return self._down if self.world is None else self.world.silence

    @property
    def refusal(self) -> str:
        """Why requests are not welcome, though they may be sent; "" while they are."""
        world = self.world
        return self.down_cause or (world.refusal if world is not None else "")

    async def view(self, timeout: float) -> ReplicaView:
        """What is known of it within `timeout` seconds."""
        if (world := self.world) is not None:
            view = await world.view(self.index, timeout)
            if world is self.world:
                return view
        info = self.info
        ranks = tuple(RankView(rank.rank, rank.pid, rank.host) for rank in info.ranks) if info is not None else ()
        return ReplicaView(self.index, info.epoch if info is not None else 0, self._down, ranks)

    @property
    def load(self) -> int:
        """Tokens that its world has still to compute, as far as can be known here."""
        return sum(request.work for request in self.requests.values())

    async def attach(self) -> None:
        """Waits for a world that is starting, however long. Raises ConfigError (nothing there) or Unavailable."""
        while True:
            info = await settled(self._source)
            if info.state != "ready":
                raise Unavailable(f"the cluster of {info.model} is {info.state}: {info.cause or 'no cause is known'}")
            try:
                async with self._attaching:
                    await self._adopt(info)
                return
            except (DeadlineExceeded, Unavailable):
                # It may have died just now, which nobody has written down yet.
                later = await self._news_of(info)
                if later is None or not _is_over(info, later):
                    raise

    async def glance(self) -> None:
        """Takes a world that is ready at this moment, without waiting for one."""
        try:
            async with asyncio.timeout(GLANCE_S):
                await self._try_attach()
        except TimeoutError:
            logger.debug("replica %d cannot be attached to within %g s", self.index, GLANCE_S)

    def look_out(self) -> None:
        """Begins to wait for the next world, in the background."""
        if self._revival is None or self._revival.done():
            self._revival = asyncio.create_task(self._revive())

    async def buried(self) -> None:
        """Waits until the cause of a loss is known, a second or two."""
        if self._burial is not None:
            await asyncio.wait([self._burial])

    async def close(self) -> None:
        """Ends the lease with its world. Idempotent."""
        tasks = [task for task in (self._burial, self._revival) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        world, self._world, self._down = self._world, None, "the engine is closed"
        self.may_return = False
        if world is not None:
            await world.close()

    def on_output(self, world: World, message: pb.RequestOutput) -> None:
        if world is self.world:
            self._holder.on_output(self, message)

    def on_lost(self, world: World) -> None:
        if world is not self._world:
            return
        self._down = world.obituary()
        self.may_return = True
        self.prefixes.clear()
        self._burial = asyncio.create_task(self._bury(world))
        self._holder.on_lost(self)

    def on_change(self) -> None:
        self._holder.on_change()

    def is_busy(self) -> bool:
        return bool(self.requests)

    async def is_over(self, world: World) -> bool:
        info = await self._read_quietly(GLANCE_S / 4)
        return info is not None and _is_over(world.info, info)

    async def _bury(self, world: World) -> None:
        """A world is gone: learn the cause and whether another follows, and look for that."""
        try:
            self._down = await self._cause(world)
        finally:
            self._world = None
            self._holder.on_change()
        logger.info("%s", self._down)
        await world.close()
        self.look_out()

    async def _cause(self, world: World) -> str:
        """The supervisor knows more than a broken stream tells, and takes a second or two to find it out."""
        info = await self._news_of(world.info)
        self.may_return = _may_return(info)
        if info is not None and info.state == "stopped" and not info.cause:
            return f"the cluster of {info.model} was stopped"
        if info is None or not info.cause:
            return world.obituary()
        named = any(f"rank {rank}" in info.cause for rank in world.lost)
        return info.cause if named else f"{info.cause} ({world.obituary()})"

    async def _news_of(self, info: ClusterInfo) -> ClusterInfo | None:
        """What is read once a world is known to be over; what is read last when that takes too long."""
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
        """None when nothing can be read now: while a world is down that is no news."""
        try:
            async with asyncio.timeout(max(timeout, 0.0)):
                return await self._source.read()
        except (AllspanError, TimeoutError) as error:
            logger.debug("the cluster cannot be read: %s", error)
            return None

    async def _revive(self) -> None:
        while not await self._try_attach():
            await asyncio.sleep(REVIVE_POLL_S)

    async def _try_attach(self) -> bool:
        """Attaches if a world is ready now; a failure to do so is no news while the cluster is down."""
        async with self._attaching:
            if self._world is not None:
                return True
            info = await self._read_quietly(OPEN_TIMEOUT_S)
            if info is None or info.state != "ready":
                self._note(info)
                return False
            try:
                await self._adopt(info)
            except AllspanError as error:
                logger.debug("cannot attach to epoch %d: %s", info.epoch, error)
                return False
            logger.info("attached to epoch %d of %s", info.epoch, info.model)
            return True

    def _note(self, info: ClusterInfo | None) -> None:
        self._down = (info.cause if info is not None else "") or self._down
        if self.may_return != _may_return(info):
            self.may_return = not self.may_return
            self._holder.on_change()

    async def _adopt(self, info: ClusterInfo) -> None:
        world = World(info, self._connect, self, self._call_timeout)
        try:
            await world.open(OPEN_TIMEOUT_S)
            if await self.is_over(world):  # it may have answered late, across a network that was broken meanwhile
                raise Unavailable(f"epoch {info.epoch} is over")
        except BaseException:
            await world.close()
            raise
        self._world = world
        self.info = info
        self._holder.on_change()


async def settled(source: ClusterSource) -> ClusterInfo:
    """What a source says once it tells of no start that is under way, or about to be."""
    while (info := await source.read()).state == "starting" or (info.state == "down" and info.will_restart):
        await asyncio.sleep(CAUSE_POLL_S)
    return info


def _is_over(info: ClusterInfo, later: ClusterInfo) -> bool:
    """Whether a world that was ready is no more, by what is said later."""
    return later.epoch != info.epoch or later.state != "ready"


def _may_return(info: ClusterInfo | None) -> bool:
    """Whether a replica that is described so, after it lost its world, may have another. One that nothing describes (a
    run directory that was removed, addresses where nobody answers) has no one who would start it again."""
    if info is None or info.state == "stopped":
        return False
    return info.state != "down" or info.will_restart
