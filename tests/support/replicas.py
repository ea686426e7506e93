"""Replicas of scripted ranks behind one session, each with what kills and restarts it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from allspan.client.cluster.requests import ResumePolicy, Session
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.tls import NO_TLS, TlsFiles
from support.fake_transport import FakeRanks, FakeSource, FakeTransport


class Replicas:
    """Two or more replicas of two ranks."""

    def __init__(self, count: int = 2, policy: ResumePolicy | None = None) -> None:
        self.ranks = [FakeRanks(2, name=f"r{i}") for i in range(count)]
        self.sources = [FakeSource(ranks.info()) for ranks in self.ranks]
        self.session = Session(self.sources, self.connect, policy, call_timeout=0.5)

    def connect(self, address: str, tls: TlsFiles = NO_TLS) -> FakeTransport:
        return self.ranks[int(address[1])].connect(address)

    async def start(
        self, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, options: RequestOptions | None = None
    ) -> ResultQueue:
        params = SamplingParams(max_tokens=max_tokens, seed=7)
        return await self.session.start(uuid.uuid4().bytes, prompt, params, options)

    async def place(self, prompt: Sequence[int], max_tokens: int = 4, options: RequestOptions | None = None) -> int:
        """Of the replica that a request goes to."""
        before = self.counts
        await self.start(prompt, max_tokens, options)
        grown = [i for i, count in enumerate(self.counts) if count != before[i]]
        return grown[-1]

    @property
    def counts(self) -> list[int]:
        """Requests that each replica's leader has got in its present epoch."""
        return [len(ranks[0].requests.get("StartRequest", ())) for ranks in self.ranks]

    def kill(self, replica: int, will_restart: bool = True) -> None:
        self.ranks[replica][1].break_stream()
        cause = f"rank 1 (pid 101 on testhost) of replica {replica} was killed"
        self.sources[replica].info = self.ranks[replica].info("down", cause, will_restart=will_restart)

    def restart(self, replica: int) -> None:
        self.ranks[replica].revive()
        self.sources[replica].info = self.ranks[replica].info()

    def step(self) -> None:
        for ranks in self.ranks:
            ranks.step()
