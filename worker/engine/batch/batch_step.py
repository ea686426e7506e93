"""A step as a rank runs it, and steps that go on as the one before did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from allspan.worker.engine.batch.pooling import PooledStep
from allspan.worker.engine.batch.rows import RowStates
from allspan.worker.scheduler.plan import Run, StepPlan
from allspan.worker.step.inputs import InputBuffers, StepInputs
from allspan.worker.step.rank_drafter import RanStep

Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """What a step's m rows of logits are for, in their order."""

    rows: Longs
    """[m]: whose they are; a row may have several."""
    positions: Longs
    """[m]: of the token that follows, in its request."""
    targets: Longs | None = None
    """[m]: that token, where it is a prompt's and known; -1 where it is to be sampled. None: everywhere."""

    @property
    def sampling(self) -> Longs:
        """The rows that get a token."""
        return self.rows if self.targets is None else self.rows[self.targets < 0]


@dataclass(slots=True)
class BatchStep:
    """What the runs of a plan are to the model and the sampler."""

    number: int
    inputs: StepInputs | None
    """None: the plan runs no tokens."""
    logits: LogitsRows
    num_leaves: int
    """The count of `Leaves.count` when the step began."""
    num_unknown: int = 0
    """The number of token ids, from the first on, that are not known on the host yet: in their place is where the
    newest step in flight samples them."""
    drafted: tuple[int, ...] = ()
    """Rows whose last tokens are drafts; the first of their rows of logits is that before the first draft."""
    hidden: dict[int, int] = field(default_factory=dict)
    """Row → its row of logits, where its hidden state is asked for."""
    pooled: PooledStep | None = None
    """What rows with pooling make of it; their hidden states lie behind the rows of logits that are sampled."""
    ran: RanStep | None = None
    """What a drafter in the ranks is told of it; None: the plan runs no tokens."""


class DecodeRun:
    """Steps in which each row runs the token that it has just sampled, and nothing else changes: most steps are such.
    The weights have put everything else out of the caches, so the inputs are advanced in place and as little as can be
    is touched. The rows' numbers are not kept up to date meanwhile, until `settle`."""

    def __init__(self, runs: Sequence[Run], step: BatchStep, room: int) -> None:
        """`step` was the first one; `room`: steps until a row needs its next page."""
        self._runs = runs
        self._room = room
        self._count = 0
        self.step = step
        self.sampled = np.zeros(0, dtype=np.int32)
        """What the rows sampled last."""

    def continues(self, plan: StepPlan) -> bool:
        return (
            self._count < self._room
            and plan.runs == self._runs
            and not (plan.leaves or plan.joins or plan.grants or plan.drafts)
        )

    def advance(self, plan: StepPlan, buffers: InputBuffers) -> BatchStep:
        """The next step."""
        self._count += 1
        buffers.advance(self.sampled)
        step = self.step
        positions = step.logits.positions
        positions += 1
        step.number = plan.step
        return step

    def settle(self, rows: RowStates) -> None:
        """Brings the rows' numbers up to date."""
        if self._count:
            at = self.step.logits.rows
            rows.num_computed[at] += self._count
            rows.num_tokens[at] += self._count
