"""The engine's interface: the same methods on `ClientEngine` (a cluster) and on `Engine` (this process)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.counters import EngineCounters
from allspan.protos.api.expert_load import ExpertLoad
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import RequestHandle, RequestTimings, ResultQueue, TokenLogprob
from allspan.protos.api.sampling import SamplingParams

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
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the prompt's tokens from its second on, if requested."""
    vector: bytes = b""
    """The result of a request with `RequestOptions.pooling`: float32, little-endian."""
    timings: RequestTimings | None = None
    """The request's statistics."""


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
    replica: int = 0
    device: str = ""
    """A GPU's name and index, "" on the CPU."""
    numa_nodes: str = ""
    """The NUMA nodes of its processors, as in "0" or "0,1"; "" where that is not known."""
    threads: int = 0
    rss_bytes: int = 0
    """Memory that its process holds now."""
    steps: int = 0
    host_s: float = 0.0
    """Seconds of its steps outside the model's forward pass."""
    model_s: float = 0.0


@dataclass(slots=True)
class EngineStatistics(EngineCounters):
    """The leader's counters since it started, added up over the replicas, and one entry a rank."""

    model: str
    max_model_len: int
    ranks: tuple[RankStatistics, ...] = ()
    replicas: int = 1
    replicas_ready: int = 1
    experts: tuple[ExpertLoad, ...] = ()
    """The tokens of experts, an entry for each layer that has some."""

    @property
    def pages_free(self) -> int:
        return self.pages_total - self.pages_used - self.pages_cached

    @property
    def kv_usage(self) -> float:
        """Share of the pages in use, of the fullest cache group; those kept for prefix hits do not count."""
        return self.fullest_pages_used / self.fullest_pages_total if self.fullest_pages_total else 0.0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all ranks' KV caches."""
        return sum(rank.kv_bytes for rank in self.ranks)

    @property
    def prefix_hit_rate(self) -> float:
        """Fraction of the looked-up prompt tokens that were in the prefix cache; 0 before any look-up."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


@dataclass(frozen=True, slots=True)
class OpProfile:
    """The time of one op, or of its calls that one kernel ran, on one rank, in milliseconds, while profiling was on."""

    op: str
    count: int
    min_ms: float
    max_ms: float
    total_ms: float
    share: float
    """Fraction of all ops' total time."""
    kernel: str = ""
    """The kernel that ran these calls, for ops that choose among several on this device; else ""."""


class EngineProtocol(Protocol):
    """The interface of every engine. Every method may raise an AllspanError (see `allspan.protos.api.errors`); none
    waits for ever."""

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that gives none: the model's own defaults and at most 128 tokens."""

    def start_model(self) -> None:
        """Lets new requests in (the state after construction)."""

    def stop_model(self, timeout: float = 60.0) -> None:
        """Refuses new requests with Unavailable and waits for those that run; DeadlineExceeded after `timeout` s."""

    def close(self) -> None:
        """Ends every request, the model and, if this engine started it, the cluster. Idempotent."""

    def start_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> tuple[RequestHandle, ResultQueue]:
        """Admits a request (text or token ids) and returns at once; its tokens arrive in the queue. Without parameters
        it takes `default_sampling_params`."""

    def sync_request(self, handle: RequestHandle | None = None, timeout: float | None = None) -> None:
        """Waits for the end of one request, or of all; DeadlineExceeded after `timeout` s."""

    def stop_request(self, handle: RequestHandle) -> None:
        """Ends generation early; what was generated stays readable. Idempotent."""

    def release_request(self, handle: RequestHandle) -> None:
        """Forgets a request; one that still runs is stopped first. Idempotent."""

    def statistics(self) -> EngineStatistics:
        """Counters of the engine and of each rank."""

    def reset_prefix_cache(self) -> None:
        """Forgets every cached page that no request uses; those in use are forgotten when they are given back."""

    def unload_weights(self, timeout: float = 60.0) -> None:
        """Gives back the memory of weights and KV pages; the model must be stopped (`stop_model`), else Unavailable."""

    def reload_weights(self, timeout: float = 600.0) -> None:
        """Reads the weights again from the model's path, which may hold new ones of the same shapes; what the prefix
        cache held is void. The model stays stopped until `start_model`. CheckpointError."""

    def rebalance_experts(self, timeout: float = 600.0) -> None:
        """Has ranks exchange experts by the tokens since the last call, so that all have about the same load; requests
        go on meanwhile. Unavailable where no rank has experts of its own, DeadlineExceeded after `timeout` seconds."""

    def load_lora(self, name: str, path: str | Path, timeout: float = 60.0) -> None:
        """Loads a LoRA adapter from a folder that every rank can read, while requests run; requests may name it once
        this returns. All ranks have it or none. Raises InvalidRequest, AdapterRank, AdapterLoaded, TooManyAdapters,
        AdapterInUse, PermissionDenied for a folder outside of `lora_dir`, DeadlineExceeded after `timeout` seconds."""

    def unload_lora(self, name: str, timeout: float = 60.0) -> int:
        """Refuses new requests for an adapter at once. Returns the number of requests that still have it: they finish,
        and then its place is free. AdapterNotFound."""

    def list_loras(self) -> tuple[AdapterModule, ...]:
        """The adapters that requests may name, in the order in which they were loaded."""

    def start_profile(self) -> None:
        """Begins to time every op on every rank, from zero."""

    def stop_profile(self) -> None: ...

    def op_profile(self) -> tuple[OpProfile, ...]:
        """Returns the time of each op since `start_profile`, on the leader, the longest first."""

    def model_info(self) -> dict[str, Any]:
        """The model's shape, its tensors' sizes and how they lie on each rank, as JSON values."""

    def file_info(self) -> dict[str, Any]:
        """The checkpoint's files: names, bytes, format, dtype and the version of allspan that reads them."""

    def version(self) -> str:
        """Returns the versions of allspan, its kernels and the libraries it runs on, in one line."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        """Runs prompts to their end, together, and returns them in order. A list of integers is one prompt. Without
        parameters they take `default_sampling_params`."""

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Completion:
        """Answers a conversation by the model's chat template: messages with `role` and `content`, or one user's text.
        InvalidRequest where the model has no template."""

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        """`generate` for asyncio; cancelling it stops its requests."""
