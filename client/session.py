"""A facade's hold on a cluster: the open requests, the loss of a world, and attaching to the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from allspan.client.fanout import RankRefused
from allspan.client.source import ClusterSource
from allspan.client.transport.base import Connect
from allspan.client.world import World
from allspan.protos import worker_pb2 as pb
from allspan.protos.cluster import ClusterInfo
from allspan.protos.errors import (
    AllspanError,
    AlreadyExists,
    DeadlineExceeded,
    RequestCancelled,
    Unavailable,
    from_code,
)
from allspan.protos.options import RequestOptions
from allspan.protos.results import Output, ResultQueue
from allspan.protos.sampling import SamplingParams
from allspan.protos.wire import deliver, options_to_wire, sampling_to_wire

CALL_TIMEOUT_S = 30.0
OPEN_TIMEOUT_S = 10.0
CAUSE_TIMEOUT_S = 1.5
CAUSE_POLL_S = 0.02
REVIVE_POLL_S = 0.25

logger = logging.getLogger(__name__)


class Session:
    """Lives on one asyncio loop; every method must run there. At most one world at a time."""

    def __init__(self, source: ClusterSource, connect: Connect, call_timeout: float = CALL_TIMEOUT_S) -> None:
        self.info: ClusterInfo | None = None
        self._source = source
        self._connect = connect
        self._call_timeout = call_timeout
        self._world: World | None = None
        self._down = "not attached to a cluster"
        self._closed = False
        self._open: dict[bytes, ResultQueue] = {}
        self._burial: asyncio.Task[None] | None = None
        self._attaching = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def down_cause(self) -> str:
        """Why no world is there; "" while one is."""
        return self._down if self._world is None or self._world.lost else ""

    async def attach(self, timeout: float) -> None:
        """Waits for a cluster that is starting. Raises ConfigError (nothing there), Unavailable, DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout):
                while (info := await self._source.read()).state == "starting":
                    await asyncio.sleep(CAUSE_POLL_S)
                if info.state != "ready":
                    cause = info.cause or "no cause is known"
                    raise Unavailable(f"the cluster of {info.model} is {info.state}: {cause}")
                async with self._attaching:
                    await self._adopt(info)
        except TimeoutError:
            raise DeadlineExceeded(f"the cluster was not ready within {timeout:g} s") from None

    async def start(
        self,
        request_id: bytes,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
    ) -> ResultQueue:
        """Admits a request on every rank. Cancelling this leaves no request behind."""
        world = await self._current_world()
        if request_id in self._open:
            raise AlreadyExists(f"request_id is {request_id.hex()}, which is in use; release that request first")
        queue = self._open[request_id] = ResultQueue()
        message = pb.StartRequestMessage(
            request_id=request_id,
            model=world.info.model,
            prompt_token_ids=prompt_ids,
            sampling=sampling_to_wire(params),
        )
        options_to_wire(options or RequestOptions(), message)
        admission = asyncio.create_task(self._admit(world, message))
        try:
            await asyncio.shield(admission)
        except asyncio.CancelledError:
            self._spawn(self._undo(admission, request_id))
            raise
        return queue

    async def stop(self, request_id: bytes) -> None:
        """Ends a request early; its final output arrives by itself. Unknown and ended ones are left alone."""
        if request_id in self._open and self._world is not None:
            await self._world.stop([request_id])

    def release(self, request_id: bytes) -> None:
        """Ends a request for its reader at once, and for the ranks in the background."""
        queue = self._open.get(request_id)
        if queue is not None:
            queue.put(Output(finish_reason="cancelled"))
            self._spawn(self.stop(request_id))

    def queues(self, request_id: bytes | None = None) -> list[ResultQueue]:
        """Of one open request (empty when it has ended), or of all."""
        if request_id is None:
            return list(self._open.values())
        return [self._open[request_id]] if request_id in self._open else []

    async def statuses(self) -> list[pb.WorkerStatus]:
        return await (await self._current_world()).statuses(self._call_timeout)

    async def control(self, operation: str, timeout: float) -> None:
        await (await self._current_world()).control(operation, timeout)

    async def inspect(self, what: str) -> dict[str, Any]:
        return await (await self._current_world()).inspect(what)

    async def close(self) -> None:
        """Ends every request with RequestCancelled, and the leases with the ranks. Idempotent."""
        self._closed = True
        self._fail_all(RequestCancelled("the engine was closed"))
        tasks = [*self._background, *([self._burial] if self._burial else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        world, self._world, self._down = self._world, None, "the engine is closed"
        if world is not None:
            await world.close()

    async def _admit(self, world: World, message: pb.StartRequestMessage) -> None:
        try:
            await world.start(message)
        except RankRefused as refusal:
            if not refusal.ambiguous:
                self._open.pop(message.request_id, None)
            if await world.judge(refusal) or (world.lost and isinstance(refusal.error, Unavailable)):
                await self._buried()
                raise Unavailable(self._down) from None
            raise refusal.error from None

    async def _undo(self, admission: asyncio.Task[None], request_id: bytes) -> None:
        """The caller left during the fan-out: let that end, then end what it began."""
        await asyncio.wait([admission])
        if not admission.cancelled() and admission.exception() is None:
            self.release(request_id)

    def _on_output(self, message: pb.RequestOutput) -> None:
        queue = self._open.get(message.request_id)
        if queue is None:
            return
        deliver(queue, message)
        if message.finish_reason or message.error_code:
            del self._open[message.request_id]
            if self._world is not None and message.finish_reason not in ("stop", "length"):
                self._spawn(self._world.forget([message.request_id]))

    def _on_lost(self, world: World) -> None:
        if world is self._world and not self._closed:
            self._burial = asyncio.create_task(self._bury(world))

    async def _bury(self, world: World) -> None:
        """A world is gone: learn the cause, tell every open request, and look for the next world."""
        self._down = world.obituary()
        try:
            self._down = await self._cause(world)
        finally:
            self._world = None
            self._fail_all(Unavailable(self._down))
        logger.info("%s", self._down)
        await world.close()
        self._spawn(self._revive())

    async def _cause(self, world: World) -> str:
        """The supervisor knows more than a broken stream tells, and takes up to a second to find it out."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CAUSE_TIMEOUT_S
        while loop.time() < deadline:
            info = await self._read_quietly(deadline - loop.time())
            if info is not None and info.state == "stopped" and not info.cause:
                return f"the cluster of {info.model} was stopped"
            if info is not None and info.state in ("down", "stopped") and info.cause:
                named = any(f"rank {rank}" in info.cause for rank in world.lost)
                return info.cause if named else f"{info.cause} ({world.obituary()})"
            await asyncio.sleep(CAUSE_POLL_S)
        return world.obituary()

    async def _read_quietly(self, timeout: float) -> ClusterInfo | None:
        """None when nothing can be read now: while a world is down that is no news."""
        try:
            async with asyncio.timeout(max(timeout, 0.0)):
                return await self._source.read()
        except (AllspanError, TimeoutError) as error:
            logger.debug("the cluster cannot be read: %s", error)
            return None

    async def _buried(self) -> None:
        if self._burial is not None:
            await asyncio.wait([self._burial])

    async def _revive(self) -> None:
        while self._world is None and not await self._try_attach():
            await asyncio.sleep(REVIVE_POLL_S)

    async def _try_attach(self) -> bool:
        """Attaches if a world is ready now; a failure to do so is no news while the cluster is down."""
        async with self._attaching:
            if self._world is not None:
                return True
            info = await self._read_quietly(OPEN_TIMEOUT_S)
            if info is None:
                return False
            if info.state != "ready":
                self._down = info.cause or self._down
                return False
            try:
                await self._adopt(info)
            except AllspanError as error:
                logger.debug("cannot attach to epoch %d: %s", info.epoch, error)
                return False
            logger.info("attached to epoch %d of %s", info.epoch, info.model)
            return True

    async def _adopt(self, info: ClusterInfo) -> None:
        world = World(info, self._connect, self._on_output, self._on_lost, lambda: bool(self._open), self._call_timeout)
        try:
            await world.open(OPEN_TIMEOUT_S)
        except BaseException:
            await world.close()
            raise
        self._world = world
        self.info = info

    async def _current_world(self) -> World:
        if self._world is not None and self._world.lost:
            await self._buried()
        if self._closed or (self._world is None and not await self._try_attach()) or self._world is None:
            raise Unavailable(self._down)
        return self._world

    def _fail_all(self, error: AllspanError) -> None:
        queues, self._open = self._open, {}
        for queue in queues.values():
            queue.fail(from_code(error.code, error.message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
