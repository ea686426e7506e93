"""StepPlan: one step as a value. The same object is the message over MPI, the test fixture and the debug dump."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from allspan.protos.api.results import TokenLogprob
from allspan.worker.cache.page_pool import Copy
from allspan.worker.step.rank_drafter import Drafted, DraftRun


class Operation(enum.IntEnum):
    """Something that all ranks do at the same step, beside running rows."""

    NONE = 0
    SHUTDOWN = 1
    UNLOAD_WEIGHTS = 2
    RELOAD_WEIGHTS = 3
    START_PROFILE = 4
    STOP_PROFILE = 5
    REBALANCE_EXPERTS = 6
    SWITCH_EXPERTS = 7
    READ_ADAPTER = 8
    ADD_ADAPTER = 9
    DROP_ADAPTER = 10


@dataclass(frozen=True, slots=True)
class Join:
    """A request gets a row. Every rank has its payload in its inbox, with the same `digest` (64 bits)."""

    row: int
    request_id: bytes
    digest: int
    num_computed: int = 0
    """Tokens whose KV the granted pages already hold (a prefix hit)."""
    num_output: int = 0
    """The number of tokens at the payload's end that count as output (a resumption)."""
    adapter: int = -1
    """Its slot; -1: none."""
    owner: int = 0
    """The attention rank whose pages it gets."""


@dataclass(frozen=True, slots=True)
class Run:
    """`num_tokens` more tokens of a row are computed: a prefill chunk, a decode, a draft verification alike."""

    row: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages that a row gets in one cache group."""

    row: int
    pages: tuple[int, ...]
    group: int = 0
    first: int = 0
    """The place of the first one in the row's page table: pages of equally many tokens, from the prompt's beginning."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Applied in this order: leaves, drops, placements, joins, grants, saves, loads, runs, operation, draft runs. A
    row samples when its run reaches its last token.

    A finish is a leave and a drop; a preemption is a leave alone, its resumption a join with `num_output`; a request
    that ends while it waits is a drop alone. So every payload that reached the leader is dropped by exactly one plan.
    """

    epoch: int
    step: int
    tokens_hash: int
    """32 bits over the tokens that were known when this was planned: a rank that sampled others sees the divergence."""
    leaves: tuple[int, ...] = ()
    """Rows that become free. The request's tokens are kept, in case it joins again."""
    drops: tuple[bytes, ...] = ()
    """Requests that never run again: their payload and tokens are forgotten."""
    joins: tuple[Join, ...] = ()
    grants: tuple[Grant, ...] = ()
    saves: tuple[Copy, ...] = ()
    """Device page → host page, before anything is written to the device page again."""
    loads: tuple[Copy, ...] = ()
    """Host page → device page."""
    runs: tuple[Run, ...] = ()
    """A row whose last token is still being sampled by the newest step in flight runs that token."""
    in_flight: int = 0
    """Steps whose tokens were not known yet when this one was planned: a rank that carries the plan out has landed all
    others."""
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Row and the last tokens of its run, which are only proposed: every one is sampled as well, and those up to the
    first that differs are kept."""
    draft_runs: tuple[DraftRun, ...] = ()
    """What the drafter in the ranks does when the tokens of this step are known."""
    operation: Operation = Operation.NONE
    argument: bytes = b""
    """What the operation is about."""
    placements: tuple[tuple[int, int], ...] = ()
    """Adapter slots that get another adapter, each with its digest: every rank has that in host memory."""

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step made: row → new token ids (none for a row that has not reached its last token).

    A token of -1 says that the row's logits were not finite.
    """

    step: int
    tokens: dict[int, tuple[int, ...]]
    logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    """Row → log-probabilities of its new tokens, one entry a token, for those rows that asked."""
    tokens_hash: int = 0
    """32 bits over all tokens so far; the next plan carries it."""
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    """Row → of the prompt tokens whose predecessors this step ran, of those rows that asked."""
    hidden_states: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Row → what the head read of its last token, for those rows that asked."""
    vectors: dict[int, bytes] = field(default_factory=dict)
    """Row → the result of a request with pooling whose prompt has ended, as little-endian float32; on the leader
    alone."""
    drafted: dict[int, Drafted] = field(default_factory=dict)
    """Row → what has come of its draft run."""
    draft_s: float = 0.0
    """Seconds that the draft runs took on this rank."""
