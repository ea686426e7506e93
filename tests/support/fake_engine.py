"""An engine that follows a script on the test's own loop, and writes down what a gateway asked of it."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allspan.client.cluster.snapshot import ClusterView, RankView, ReplicaView
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.counters import STEP_TOKENS_BOUNDS
from allspan.protos.api.engine import EngineStatistics, Prompt, RankStatistics
from allspan.protos.api.errors import AllspanError, Unavailable
from allspan.protos.api.expert_load import ExpertLoad
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output, RequestHandle, RequestTimings, ResultQueue, TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.cluster_file import ClusterInfo

ANSWER = "The quick brown fox jumps over the lazy dog. Ünïcödé 🦊!"


@dataclass
class Asked:
    """One request as the engine saw it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    queue: ResultQueue
    options: RequestOptions
    steps: int = 0
    stopped: bool = False
    released: bool = False
    steps_when_stopped: int = -1
    arrived_at: float = field(default_factory=time.time)


@dataclass
class FakeEngine:
    """Answers every prompt with `tokens`, one a step, then with `eos`; and with what the script says goes wrong."""

    tokens: Sequence[int]
    eos: int
    vocab_size: int
    max_model_len: int = 256
    adapters: tuple[AdapterModule, ...] = ()
    lora_dir: str = ""
    adapter_failure: AllspanError | None = None
    """What `aload_lora` and `aunload_lora` raise."""
    step_s: float = 0.0
    stop_s: float = 0.0
    """Until it hears that a request is to stop."""
    fail_after: int | None = None
    """Steps after which a request fails with `failure`."""
    failure: AllspanError = field(default_factory=lambda: Unavailable("rank 1 (pid 7 on here) died: signal 9"))
    refusal: AllspanError | Exception | None = None
    """What `astart_request` raises."""
    endless: bool = False
    """Repeats `tokens` until max_tokens; never ends by itself."""
    admission: asyncio.Event | None = None
    """Held until it is set, a request is taken even if its caller has left by then."""
    down_cause: str = ""
    view_s: float = 0.0
    """What `aview` takes, unless it is given less."""
    looks: int = 0
    controls: list[tuple[str, float]] = field(default_factory=list)
    """What `acontrol` was asked for."""
    control_failures: dict[str, AllspanError] = field(default_factory=dict)
    """By operation, what it raises."""
    pages: Sequence[pb.PageEvents] = ()
    """What `page_events` tells."""
    asked: dict[str, Asked] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def cluster(self) -> ClusterInfo:
        known = ClusterInfo(1, "ready", "tiny", "/nonexistent", self.max_model_len, self.vocab_size, (self.eos,))
        return replace(known, adapters=self.adapters, lora_dir=self.lora_dir)

    @property
    def is_ready(self) -> bool:
        return not self.down_cause

    @property
    def running(self) -> list[Asked]:
        return [asked for asked in self.asked.values() if not asked.queue.state.is_final]

    @property
    def last(self) -> Asked:
        return list(self.asked.values())[-1]

    async def astart_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> tuple[RequestHandle, ResultQueue]:
        if self.admission is not None:
            await self.admission.wait()
        if self.refusal is not None:
            raise self.refusal
        if self.down_cause:
            raise Unavailable(self.down_cause)
        assert request_id is not None
        assert not isinstance(prompt, str)
        params = sampling_params or SamplingParams()
        asked = self.asked[request_id] = Asked(tuple(prompt), params, ResultQueue(), options or RequestOptions())
        task = asyncio.create_task(self._run(asked))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return RequestHandle(request_id, "tiny"), asked.queue

    async def astop_request(self, handle: RequestHandle) -> None:
        if self.stop_s:
            await asyncio.sleep(self.stop_s)
        asked = self.asked[handle.request_id]
        if not asked.stopped:
            asked.stopped, asked.steps_when_stopped = True, asked.steps

    async def aview(self, timeout: float) -> ClusterView:
        self.looks += 1
        await asyncio.sleep(min(self.view_s, timeout))
        if self.down_cause:
            return ClusterView((ReplicaView(0, 1, self.down_cause, (RankView(0, 7, "here"),)),))
        counted = self.counted()
        return ClusterView((ReplicaView(0, 1, "", (RankView(0, 7, "here", 0.1, counted.ranks[0]),), counted),))

    def counted(self) -> EngineStatistics:
        """What its only rank counts."""
        made = sum(asked.steps for asked in self.asked.values())
        ended = sum(asked.queue.state.is_final for asked in self.asked.values())
        rank = RankStatistics(
            0, 7, "here", "running", made, 0.01, 2000, 100, 500, 1.5, "fake", 0, "", "0", 2, 1000, made
        )
        return EngineStatistics(
            model="tiny",
            max_model_len=self.max_model_len,
            running=len(self.running),
            waiting=0,
            pages_total=64,
            pages_used=min(4 * len(self.running), 64),
            fullest_pages_total=64,
            fullest_pages_used=min(4 * len(self.running), 64),
            page_size=16,
            prompt_tokens=sum(len(asked.prompt) for asked in self.asked.values()),
            generated_tokens=made,
            finished_requests=ended,
            preemptions=1,
            steps=made,
            host_s=0.001 * made,
            model_s=0.01 * made,
            ranks=(rank,),
            pages_cached=8,
            prefix_query_tokens=100,
            prefix_hit_tokens=63,
            generated_tokens_per_s=845.0,
            prompt_tokens_per_s=1203.0,
            step_tokens=(made, *(0 for _ in STEP_TOKENS_BOUNDS)),
            step_tokens_sum=made,
            adapter_slots=4,
            experts=(ExpertLoad(3, (10, 60, 30, 0), (70.0, 30.0)),),
        )

    async def acontrol(self, operation: str, timeout: float = 0.0) -> None:
        self.controls.append((operation, timeout))
        if operation in self.control_failures:
            raise self.control_failures[operation]

    async def aload_lora(self, name: str, path: str, base_model_name: str = "") -> None:
        self.controls.append((f"load {name} from {path}", 0.0))
        if self.adapter_failure is not None:
            raise self.adapter_failure
        self.adapters += (AdapterModule(name, path, base_model_name).loaded(),)

    async def aunload_lora(self, name: str) -> int:
        self.controls.append((f"unload {name}", 0.0))
        if self.adapter_failure is not None:
            raise self.adapter_failure
        self.adapters = tuple(each for each in self.adapters if each.name != name)
        return len(self.running)

    async def ainspect(self, what: str) -> dict[str, Any]:
        return {"what": what}

    def page_events(self) -> list[AsyncGenerator[pb.PageEvents, None]]:
        return [self._page_events()]

    async def _page_events(self) -> AsyncGenerator[pb.PageEvents, None]:
        for told in self.pages:
            yield told
        await asyncio.Event().wait()

    def release_request(self, handle: RequestHandle) -> None:
        if handle.request_id in self.asked:
            self.asked[handle.request_id].released = True

    async def _run(self, asked: Asked) -> None:
        if asked.options.pooling:
            await self._pool(asked)
            return
        if asked.params.prompt_logprobs is not None:
            for half in _halves(asked.prompt[1:]):  # a long prompt's come over several steps
                entries = tuple(prompt_logprob(token, asked.params.prompt_logprobs) for token in half)
                asked.queue.put(Output(prompt_logprobs=entries))
                await asyncio.sleep(self.step_s)
        while not asked.queue.state.is_final:
            await asyncio.sleep(self.step_s)
            if asked.stopped:
                asked.queue.put(Output(finish_reason="cancelled"))
            elif asked.steps == self.fail_after:
                asked.queue.fail(self.failure)
            else:
                asked.queue.put(self._step(asked))
                asked.steps += 1

    async def _pool(self, asked: Asked) -> None:
        """A vector of the prompt's length and its first id; with `endless`, none until it is stopped."""
        while self.endless and not asked.stopped:
            await asyncio.sleep(self.step_s)
        await asyncio.sleep(self.step_s)
        if asked.stopped:
            asked.queue.put(Output(finish_reason="cancelled"))
            return
        if self.fail_after is not None:
            asked.queue.fail(self.failure)
            return
        timings = RequestTimings(0.0004, 0.0, 0.002, len(asked.prompt), 2, 0, asked.arrived_at)
        vector = struct.pack("<2f", len(asked.prompt), asked.prompt[0])
        asked.queue.put(Output(finish_reason="stop", timings=timings, vector=vector))

    def _step(self, asked: Asked) -> Output:
        ended = asked.steps >= len(self.tokens) and not self.endless
        token = self.eos if ended else self.tokens[asked.steps % len(self.tokens)]
        is_eos = token == self.eos and not asked.params.ignore_eos
        reason = "stop" if is_eos or token in asked.params.stop_token_ids else ""
        reason = reason or ("length" if asked.steps + 1 == asked.params.max_tokens else "")
        num_prompt = len(asked.prompt)
        timings = RequestTimings(0.0004, 0.001, 0.002, num_prompt, 2, asked.steps + 1, asked.arrived_at)
        logprobs: tuple[TokenLogprob, ...] = ()
        if asked.params.logprobs is not None:
            logprobs = (TokenLogprob(-0.5, tuple((token + i, -0.5 - i) for i in range(asked.params.logprobs))),)
        return Output((token,), logprobs, reason, token if reason == "stop" else None, timings if reason else None)


def prompt_logprob(token: int, count: int) -> TokenLogprob:
    """The second most likely was in the prompt."""
    return TokenLogprob(-token / 10, tuple((token + 1 - i, -float(i)) for i in range(count)))


def _halves(ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    return ids[: len(ids) // 2], ids[len(ids) // 2 :]
