"""StepPlan: one step as a value. The same object is the message over MPI, the test fixture and the debug dump."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Operation(enum.IntEnum):
    """Something that all ranks do at the same step, beside running rows."""

    NONE = 0
    SHUTDOWN = 1


@dataclass(frozen=True, slots=True)
class Join:
    """A request gets a row. Its payload lies in every rank's inbox under `request_id`; `digest` (64 bits) must match."""

    row: int
    request_id: bytes
    digest: int
    num_computed: int = 0
    """Tokens whose KV the granted pages already hold (a prefix hit)."""
    num_output: int = 0
    """The last so many tokens of the payload count as output (a resumption)."""
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """`num_tokens` more tokens of a row are computed: a prefill chunk, a decode, a draft verification alike."""

    row: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages that a row gets, appended to those it has."""

    row: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Applied in this order: leaves, joins, grants, runs, operation. A row samples when its run reaches its last token."""

    epoch: int
    step: int
    tokens_hash: int
    """32 bits over the tokens of the last step: a rank that sampled others sees the divergence at once."""
    leaves: tuple[int, ...] = ()
    joins: tuple[Join, ...] = ()
    grants: tuple[Grant, ...] = ()
    runs: tuple[Run, ...] = ()
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    operation: Operation = Operation.NONE

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step made: row → new token ids (none for a row that has not reached its last token)."""

    step: int
    tokens: dict[int, tuple[int, ...]]
