"""NextPlan: the changes that the next step plan brings to every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from allspan.worker.cache.page_pool import Copy
from allspan.worker.scheduler.plan import Grant, Join, Operation, StepPlan
from allspan.worker.scheduler.step_builder import StepBuilder


@dataclass(slots=True)
class NextPlan:
    """Changes of rows and pages that are decided already, until a plan takes them to the ranks."""

    epoch: int
    step: int = 0
    """The number of the last plan."""
    tokens_hash: int = 0
    """A hash of all tokens that are known."""
    leaves: list[int] = field(default_factory=list)
    drops: list[bytes] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)

    @property
    def has_ends(self) -> bool:
        """Whether rows have become free or payloads can be dropped."""
        return bool(self.leaves or self.drops)

    def vacate(self, row: int) -> None:
        """The request of `row` has lost it: changes of the row that no plan has carried yet are dropped."""
        self.grants[:] = [grant for grant in self.grants if grant.row != row]
        joins = [join for join in self.joins if join.row != row]
        if len(joins) == len(self.joins):
            self.leaves.append(row)
        self.joins[:] = joins

    def make(
        self,
        step: StepBuilder,
        copies: tuple[tuple[Copy, ...], tuple[Copy, ...]],
        in_flight: int,
        operation: tuple[Operation, bytes],
        placements: tuple[tuple[int, int], ...],
    ) -> StepPlan:
        """The plan of one more step. `copies`: saves and loads; `operation`: with its argument."""
        self.step += 1
        plan = StepPlan(
            epoch=self.epoch,
            step=self.step,
            tokens_hash=self.tokens_hash,
            leaves=tuple(self.leaves),
            drops=tuple(self.drops),
            joins=tuple(self.joins),
            grants=tuple(self.grants),
            saves=copies[0],
            loads=copies[1],
            runs=tuple(step.runs),
            drafts=tuple(step.drafts.items()),
            draft_runs=tuple(step.draft_runs),
            in_flight=in_flight,
            operation=operation[0],
            argument=operation[1],
            placements=placements,
        )
        for part in (self.leaves, self.drops, self.joins, self.grants):
            part.clear()
        return plan
