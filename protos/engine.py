"""The engine's interface: the same methods on `ClientEngine` (a cluster) and on `Engine` (this process)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from allspan.protos.results import RequestHandle, ResultQueue, TokenLogprob
from allspan.protos.sampling import SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request of `generate`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """One rank's counters since it started."""

    rank: int
    pid: int
    host: str
    state: str
    progress: int
    progress_age_s: float
    peak_rss_bytes: int
    weight_bytes: int
    kv_bytes: int
    load_s: float
    kernels: str


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The leader's counters since it started, and one entry a rank."""

    model: str
    max_model_len: int
    running: int
    waiting: int
    pages_total: int
    pages_used: int
    page_size: int
    prompt_tokens: int
    generated_tokens: int
    finished_requests: int
    preemptions: int
    steps: int
    host_s: float
    model_s: float
    ranks: tuple[RankStatistics, ...] = ()


class EngineProtocol(Protocol):
    """Every method may raise an AllspanError (see `allspan.protos.errors`); none waits for ever."""

    def start_model(self) -> None:
        """Lets new requests in (the state after construction)."""

    def stop_model(self, timeout: float = 60.0) -> None:
        """Refuses new requests with Unavailable and waits for those that run; DeadlineExceeded after `timeout` s."""

    def close(self) -> None:
        """Ends every request, the model and, if this engine started it, the cluster. Idempotent."""

    def start_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> tuple[RequestHandle, ResultQueue]:
        """Admits a request (text or token ids) and returns at once; its tokens arrive in the queue."""

    def sync_request(self, handle: RequestHandle | None = None, timeout: float | None = None) -> None:
        """Waits for the end of one request, or of all; DeadlineExceeded after `timeout` s."""

    def stop_request(self, handle: RequestHandle) -> None:
        """Ends generation early; what was generated stays readable. Idempotent."""

    def release_request(self, handle: RequestHandle) -> None:
        """Forgets a request; one that still runs is stopped first. Idempotent."""

    def statistics(self) -> EngineStatistics:
        """Counters of the engine and of each rank."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Runs prompts to their end, together, and returns them in order. A list of integers is one prompt."""

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """`generate` for asyncio; cancelling it stops its requests."""
