"""One replica of scripted ranks behind a session, with what kills and restarts it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from allspan.client.cluster.requests import ResumePolicy, Session
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import ResultQueue
from allspan.protos.api.sampling import SamplingParams
from support.fake_transport import FakeRanks, FakeSource

KILLED = "rank 1 (pid 101 on testhost) was killed by SIGKILL"


class MortalCluster:
    """One replica of two ranks."""

    def __init__(
        self, policy: ResumePolicy | None = None, eos_token_ids: tuple[int, ...] = (), call_timeout: float = 0.5
    ) -> None:
        self.ranks = FakeRanks(2)
        self.eos_token_ids = eos_token_ids
        self.source = FakeSource(self.ranks.info(eos_token_ids=eos_token_ids))
        self.session = Session([self.source], self.ranks.connect, policy, call_timeout)

    async def start(self, max_tokens: int = 4, options: RequestOptions | None = None) -> tuple[bytes, ResultQueue]:
        request_id = uuid.uuid4().bytes
        params = SamplingParams(max_tokens=max_tokens, seed=7)
        return request_id, await self.session.start(request_id, [1, 2, 3], params, options)

    def kill(self, rank: int = 1, will_restart: bool = True) -> None:
        self.ranks[rank].break_stream("Socket closed")
        self.source.info = self.ranks.info("down", KILLED, will_restart=will_restart)

    def restart(self) -> None:
        self.ranks.revive()
        self.source.info = self.ranks.info(eos_token_ids=self.eos_token_ids)

    async def die_and_return(self) -> None:
        """A whole loss: noticed here, and followed by the next epoch."""
        self.kill()
        await until(lambda: self.session.down_cause)
        self.restart()
        await until(lambda: not self.session.down_cause)

    @property
    def sent(self) -> list[pb.StartRequestMessage]:
        """To the leader of the present epoch."""
        return self.ranks[0].requests.get("StartRequest", [])


async def until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.001)


async def tokens_of(queue: ResultQueue) -> list[int]:
    async with asyncio.timeout(5):
        return [token for output in [output async for output in queue] for token in output.token_ids]
