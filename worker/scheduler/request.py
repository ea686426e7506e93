"""Request: a payload as it lies in every rank's inbox, and its life on the leader."""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass, field

from allspan.protos.api.adapters import NO_ADAPTER
from allspan.protos.api.errors import InternalError
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.sampling.grammar import CompiledGrammar
from allspan.worker.step.row_inputs import PromptEmbeddings, PromptPositions


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_S = RequestStatus
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.CANCELLED, _S.FAILED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.FINISHED, _S.CANCELLED, _S.FAILED}),
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.CANCELLED, _S.FAILED}),
    _S.FINISHED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.FAILED: frozenset(),
}
"""A preempted request waits like a new one, with its output kept; nothing leaves the last three."""


@dataclass(slots=True)
class HeldPages:
    """The pages that a running request holds in one cache group."""

    first: int
    """The place of the first one in the request's page table; those before it were given back."""
    pages: list[int]
    num_inserted: int = 0
    """Pages, from the prompt's beginning, that have been offered to the prefix cache."""

    @property
    def last(self) -> int:
        """The place behind the last one."""
        return self.first + len(self.pages)


@dataclass(slots=True, eq=False)
class Request:
    """One request. What stands before `grammar` is the payload, equal on every rank; the rest is the leader's record.

    `request_id` is 16 bytes; `params.seed` is set where the request was accepted, so that all ranks draw alike.
    """

    request_id: bytes
    client_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    options: RequestOptions = field(default_factory=RequestOptions)
    adapter: int = NO_ADAPTER
    """The digest of the load of the adapter that changes the model for this request."""
    embeddings: PromptEmbeddings | None = None
    """Rows that take the place of some prompt tokens' embeddings."""
    positions: PromptPositions | None = None
    """The prompt's positions; None: each token's index."""
    wants_hidden_state: bool = False
    """The result is the hidden state of the prompt's last token, with one token beside it."""
    num_resumed: int = 0
    """The number of `output_token_ids` that came with the payload, as another epoch made them."""
    grammar: CompiledGrammar | None = None
    """The compiled grammar of `params`: each rank compiles its own, before it takes the request in."""
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    row: int = -1
    num_computed: int = 0
    """Tokens whose KV lies in its pages, as far as is known: steps in flight are not counted."""
    num_drafted: int = 0
    """Tokens whose KV a drafter in the ranks has in its pages."""
    num_in_flight: int = 0
    """Tokens that the steps in flight compute."""
    num_unknown: int = 0
    """Tokens that the steps in flight sample."""
    owner: int = 0
    """The attention rank whose pages it has, or had last."""
    held: list[HeldPages] = field(default_factory=list)
    """Its pages in each cache group; empty while it waits."""
    max_tokens: int = 0
    """`params.max_tokens`, cut to what the context leaves; set on admission."""
    order: int = 0
    """Counts arrivals."""
    arrived_at: float = 0.0
    arrived_wall: float = 0.0
    """Seconds since 1970; the others are on the scheduler's clock."""
    started_at: float = 0.0
    first_token_at: float = 0.0
    keys: list[bytes] = field(default_factory=list)
    """The keys of its full pages, as far as they were needed; see `allspan.worker.cache.prefix_cache`."""
    awaits: bytes = b""
    """While it waits for a page that another request computes: the key of the last such page."""
    generation: int = -1
    """The generation of the prefix cache when the request joined; -1: it does not take part."""
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    preemptions: int = 0
    num_prompt_logprobs: int = 0
    """The number of prompt tokens whose log-probabilities have been delivered."""
    _digest: int | None = None

    def __post_init__(self) -> None:
        if len(self.request_id) != 16:
            raise InternalError(f"request_id has {len(self.request_id)} bytes, must be 16")
        if self.params.seed is None:
            raise InternalError("a request without a seed reached the engine: its ranks could not draw alike")

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_scheduled(self) -> int:
        """Tokens whose KV is computed when the steps in flight are over."""
        return self.num_computed + self.num_in_flight

    @property
    def num_pending(self) -> int:
        """Tokens that are still to be computed when the steps in flight are over; 1 is a decode, 0: the request ends
        with them for certain."""
        output, unknown = len(self.output_token_ids), self.num_unknown
        pending = len(self.prompt_token_ids) + output - self.num_computed - self.num_in_flight
        return pending + unknown if not unknown or output + unknown < self.max_tokens else pending + unknown - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """A resumption's caller has them: it has output already."""
        return self.params.prompt_logprobs is not None and not self.num_resumed

    @property
    def model_inputs(self) -> tuple[int, bytes]:
        """What the KV depends on beside token ids: the adapter, and digests of the embedding rows and the positions."""
        return self.adapter, b"".join(each.digest for each in (self.embeddings, self.positions) if each is not None)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Token ids from `start` to `stop`, prompt and output."""
        first = len(self.prompt_token_ids)
        if stop <= first:
            return self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(start - first, 0) : stop - first]
        return (*self.prompt_token_ids[start:], *output)

    def move(self, status: RequestStatus) -> None:
        """Changes the status. Raises InternalError for a step that TRANSITIONS does not have."""
        if status not in TRANSITIONS[self.status]:
            raise InternalError(f"request {self.request_id.hex()} cannot go from {self.status.value} to {status.value}")
        self.status = status

    def digest(self) -> int:
        """64 bits over the payload: two ranks that hold the same one agree (BLAKE2b, RFC 7693)."""
        if self._digest is None:
            ids = (*self.prompt_token_ids, *self.output_token_ids[: self.num_resumed])
            text = repr((len(self.prompt_token_ids), self.params, self.options, self.model_inputs)).encode()
            data = self.request_id + struct.pack(f"<{len(ids)}q", *ids) + text
            self._digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        return self._digest
