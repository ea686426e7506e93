"""The router over all replicas of a cluster: it chooses a replica for each request, and makes the calls that concern
all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from allspan.client.cluster.adapters import ClusterAdapters
from allspan.client.cluster.discovery import ClusterSource, RankAddresses, RunDirectory
from allspan.client.cluster.page_events import page_events
from allspan.client.cluster.replica import Replica, settled
from allspan.client.cluster.request import OpenRequest
from allspan.client.cluster.routing.facade import FacadeChoice
from allspan.client.cluster.routing.knowledge import KEYS
from allspan.client.cluster.routing.prompt_keys import PromptKeys
from allspan.client.cluster.snapshot import ClusterView
from allspan.client.cluster.state import ReplicaState
from allspan.client.cluster.statistics import added, merged
from allspan.client.cluster.world import WorldClient
from allspan.client.transport.base import Connect
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import AdapterModule, unknown_adapter
from allspan.protos.api.engine import EngineStatistics
from allspan.protos.api.errors import AllspanError, ConfigError, DeadlineExceeded, Unavailable, from_code
from allspan.protos.cluster.cluster_file import ClusterInfo
from allspan.protos.config.adapters import plain_name
from allspan.protos.page_keys import PageShape

SILENCE_WAIT_S = 1.0
"""Seconds that a request waits for a heartbeat when every world is silent."""

T = TypeVar("T")


class Router:
    """The replicas of a cluster as a client sees them, made and used on one asyncio loop.

    `sources`: one for each replica, or one of a cluster that lists its replicas.
    """

    def __init__(
        self,
        sources: Sequence[ClusterSource],
        connect: Connect,
        call_timeout: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when the state of a replica has changed."""
        self.replicas: list[Replica] = []
        self.adapters = ClusterAdapters()
        """The adapters of all replicas."""
        self._sources = list(sources)
        self._connect = connect
        self._call_timeout = call_timeout
        self._news = asyncio.Event()
        self._on_change = on_change
        self._choice = FacadeChoice(0, 0)
        self._by_state: dict[ReplicaState, int] = {}
        """Masks of the replicas in these states; empty since one has changed."""
        self._looked_up: tuple[OpenRequest, PageShape, PromptKeys] | None = None
        """The keys of the prompt that a replica is being chosen for: sending it needs them again."""

    @property
    def info(self) -> ClusterInfo | None:
        """The cluster information of a connected replica or, without any, of one that was connected."""
        known = [replica for replica in self.replicas if replica.info is not None]
        connected = [replica for replica in known if replica.world is not None]
        return next((replica.info for replica in (*connected, *known)), None)

    @property
    def ready(self) -> list[Replica]:
        """The replicas that take requests."""
        return [replica for replica in self.replicas if replica.status.state.takes_requests]

    @property
    def silent(self) -> list[WorldClient]:
        """The worlds of which a rank has been silent for a while."""
        worlds = (replica.world for replica in self.replicas if replica.status.state is ReplicaState.SILENT)
        return [world for world in worlds if world is not None]

    @property
    def down_cause(self) -> str:
        """The reason why no replica takes requests, for each of them; "" while one does."""
        return self._named([replica.status.down_cause for replica in self.replicas])

    @property
    def unready_cause(self) -> str:
        """The reason why no replica is READY, for each of them; "" while one is."""
        return self._named([replica.status.cause for replica in self.replicas])

    @property
    def may_return(self) -> bool:
        """True if a request that finds no replica may wait for one."""
        return any(replica.status.state.may_return for replica in self.replicas)

    async def attach(self, timeout: float, answer_timeout: float = 0.0) -> None:
        """Waits for a cluster that is starting, and `answer_timeout` seconds for ranks at given addresses that do not
        answer; one replica that is up will do. Raises ConfigError (nothing there, or replicas that differ),
        Unavailable, DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout):
                await self._attach(answer_timeout)
        except TimeoutError:
            cause = self.down_cause
            raise DeadlineExceeded(
                f"the cluster was not ready within {timeout:g} s (startup_timeout): {cause}"
            ) from None
        for replica in self.replicas:
            replica.keep()
        self._check_alike()

    def ranked(self, request: OpenRequest) -> Iterator[tuple[Replica, int]]:
        """Replicas that take requests, the best for this one first, and the tokens of its prompt that each may have."""
        if len(self.replicas) == 1:
            yield from ((replica, 0) for replica in self.ready)
            return
        keys = partial(self._keys, request)
        for state in (ReplicaState.READY, ReplicaState.HELD):  # one that refuses is asked when no other takes it
            if among := self._in_state(state):
                for number, hit_tokens in self._choice.ranked(keys, len(request.prompt), among, self._own_load):
                    yield self.replicas[number], hit_tokens

    def sent(self, replica: Replica, request: OpenRequest) -> None:
        """Notes that the replica is about to get the request, and will have its pages."""
        if len(self.replicas) > 1:
            self._choice.sent(replica.index, request.work, self._keys(request, replica.knowledge.shape).all())
            self._looked_up = None

    def ended(self, replica: Replica, request: OpenRequest) -> None:
        """Notes that the replica has computed the request, where it does not tell so itself."""
        if len(self.replicas) > 1 and not replica.knowledge.is_told:
            replica.knowledge.expect(request.page_keys(replica.knowledge.shape))

    def may_bring(self, adapter: int) -> bool:
        """Returns whether a replica that takes no requests now may return with an adapter, which those that do lack."""
        states = (replica.status.state for replica in self.replicas)
        return self.adapters.has(adapter) and any(each.may_return and not each.takes_requests for each in states)

    async def is_changing(self) -> bool:
        """Returns whether a replica has, or is about to have, another world than the one that is connected: then a
        request that the connected ones refuse can wait for it."""
        return any(await asyncio.gather(*(replica.has_successor() for replica in self.replicas)))

    async def some_ready(self) -> None:
        """Returns when a replica takes requests; Unavailable when there is none and none that was just about to."""
        if not self.ready:
            await asyncio.gather(*(replica.cause_known() for replica in self.replicas))
            await asyncio.gather(*(replica.try_attach() for replica in self.replicas if replica.world is None))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SILENCE_WAIT_S
        while not self.ready and any(replica.world for replica in self.replicas) and loop.time() < deadline:
            await self.news(deadline - loop.time())
        if not self.ready:
            raise Unavailable(self.down_cause)

    async def news(self, timeout: float) -> None:
        """Waits until the state of a replica changes, at most `timeout` seconds."""
        try:
            async with asyncio.timeout(max(timeout, 0.0)):
                await self._news.wait()
        except TimeoutError:
            pass  # the caller looks at the states

    async def statistics(self) -> EngineStatistics:
        """The sums over the replicas that answer."""

        async def one(replica: Replica, world: WorldClient) -> EngineStatistics:
            return merged(await world.statuses(self._call_timeout), replica.index)

        answers, failures = await self._ask_all(one)
        if not answers:
            raise failures[0]
        return added(answers, len(self.replicas))

    async def view(self, timeout: float) -> ClusterView:
        """Returns the state and statistics of all replicas, as far as they are known within `timeout` seconds."""
        return ClusterView(tuple(await asyncio.gather(*(replica.view(timeout) for replica in self.replicas))))

    def page_events(self) -> list[AsyncGenerator[pb.PageEvents, None]]:
        """Returns the page events of each replica; see `page_events`."""
        return [page_events(partial(getattr, replica, "info"), self._connect) for replica in self.replicas]

    async def control(self, operation: str, timeout: float) -> None:
        """An operation on every replica that is up. Raises the first one's failure, once all have answered."""

        async def one(replica: Replica, world: WorldClient) -> None:
            await world.control(operation, timeout)
            if operation in ("reset_prefix_cache", "unload_weights", "reload_weights"):
                replica.knowledge.clear()

        _, failures = await self._ask_all(one)
        if failures:
            raise failures[0]

    async def load_adapter(self, adapter: AdapterModule, timeout: float) -> None:
        """Has every replica that is up load an adapter, or none. Raises the first one's failure."""

        async def one(replica: Replica, world: WorldClient) -> None:
            if not replica.knowledge.adapters.has(adapter.digest):
                await world.load_adapter(adapter, timeout)

        for _ in ("those that are up", "those that have come up meanwhile"):
            answers, failures = await self._ask_all(one)
            if failures:
                if answers:
                    await self._unload(adapter, timeout)
                raise failures[0]

    async def unload_adapter(self, name: str, timeout: float) -> int:
        """Has every replica that is up refuse new requests for an adapter, and returns the number of requests that
        still have it. AdapterNotFound."""
        listed = self.adapters.listed()
        adapter = next((each for each in listed if plain_name(each.name) == plain_name(name)), None)
        if adapter is None:
            raise unknown_adapter(name, [each.name for each in listed])
        answers, failures = await self._unload(adapter, timeout)
        if failures:
            raise failures[0]
        return sum(answers)

    async def _unload(self, adapter: AdapterModule, timeout: float) -> tuple[list[int], list[BaseException]]:
        async def one(replica: Replica, world: WorldClient) -> int:
            if not replica.knowledge.adapters.has(adapter.digest):
                return 0
            return await world.unload_adapter(adapter.name, timeout)

        return await self._ask_all(one)

    async def inspect(self, what: str) -> dict[str, Any]:
        """The answer of the first replica that takes requests."""
        await self.some_ready()
        world = self.ready[0].world
        assert world is not None  # ready
        return await world.inspect(what)

    async def close(self) -> None:
        """Ends the leases. Idempotent."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    def _in_state(self, state: ReplicaState) -> int:
        """The mask of the replicas in this state."""
        if state not in self._by_state:
            found = (replica.index for replica in self.replicas if replica.status.state is state)
            self._by_state[state] = sum(1 << index for index in found)
        return self._by_state[state]

    def _own_load(self, number: int) -> int:
        return self.replicas[number].own_load()

    def _keys(self, request: OpenRequest, shape: PageShape) -> PromptKeys:
        """The keys of a prompt's first pages of this shape."""
        known = self._looked_up
        if known is None or known[0] is not request or known[1] is not shape:
            known = self._looked_up = request, shape, PromptKeys(request.prompt_keys(shape))
        return known[2]

    def _announce(self) -> None:
        """Notes that a replica's state has changed, and wakes the callers of `news`."""
        self._by_state.clear()
        self._news.set()
        self._news = asyncio.Event()
        self._on_change()

    def _named(self, causes: Sequence[str]) -> str:
        """The causes of all replicas, each with its replica's name; "" if one of them is ""."""
        if not causes:
            return "not attached to a cluster"
        if not all(causes):
            return ""
        if len(causes) == 1 or all(replica.status.state is ReplicaState.CLOSED for replica in self.replicas):
            return causes[0]
        return "; ".join(named_cause(index, cause) for index, cause in enumerate(causes))

    async def _ask_all(
        self, call: Callable[[Replica, WorldClient], Awaitable[T]]
    ) -> tuple[list[T], list[BaseException]]:
        await self.some_ready()
        up = [(replica, world) for replica in self.ready if (world := replica.world) is not None]
        replies = await asyncio.gather(*(call(*pair) for pair in up), return_exceptions=True)
        answers = [reply for reply in replies if not isinstance(reply, BaseException)]
        failures: list[BaseException] = []
        for (replica, _), reply in zip(up, replies, strict=True):
            if isinstance(reply, AllspanError) and len(self.replicas) > 1:
                reply = from_code(reply.code, named_cause(replica.index, reply.message))
            if isinstance(reply, BaseException):
                failures.append(reply)
        return answers, failures

    async def _attach(self, answer_timeout: float) -> None:
        sources = await self._expanded()
        self._choice = FacadeChoice(len(sources), KEYS if len(sources) > 1 else 0)
        self.replicas = [
            Replica(known.number, source, self._connect, self._call_timeout, self._announce, known)
            for known, source in zip(self._choice.known, sources, strict=True)
        ]
        for known in self._choice.known:
            known.adapters = self.adapters.of_replica()
        if len(self.replicas) > 1:
            await asyncio.gather(*(replica.try_attach() for replica in self.replicas))
        if not any(replica.world for replica in self.replicas):
            # A run directory says itself whether its ranks are starting.
            waits = (answer_timeout if isinstance(source, RankAddresses) else 0.0 for source in sources)
            attempts = (replica.attach(wait) for replica, wait in zip(self.replicas, waits, strict=True))
            failures = await asyncio.gather(*attempts, return_exceptions=True)
            if all(failures) and isinstance(failures[0], BaseException):
                raise failures[0]

    async def _expanded(self) -> list[ClusterSource]:
        """The replicas' own sources, where the cluster's lists them."""
        if len(self._sources) > 1 or not isinstance(self._sources[0], RunDirectory):
            return self._sources
        run_dir = self._sources[0]
        info = await settled(run_dir)
        return [run_dir.below(name) for name in info.replicas] or self._sources

    def _check_alike(self) -> None:
        """Requests may move between replicas: they must mean the same everywhere."""
        infos = [replica.info for replica in self.replicas if replica.info is not None]
        for i, info in enumerate(infos):
            for field in ("model", "vocab_size", "max_model_len"):
                ours, first = getattr(info, field), getattr(infos[0], field)
                if ours != first:
                    raise ConfigError(f"replica {i} has {field} {ours!r}, replica 0 {first!r}; attach to equal ones")


def named_cause(index: int, cause: str) -> str:
    """A cause with its replica's name before it, unless the cause begins with that name already."""
    name = f"replica {index}"
    return cause if cause.startswith((f"{name} ", f"{name}:")) else f"{name}: {cause}"
