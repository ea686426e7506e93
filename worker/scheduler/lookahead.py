"""The step after one that still runs, so that a GPU need not wait for the next plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allspan.protos.api.sampling import SamplingParams
from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.step_builder import Draft

MayLaunch = Callable[[SamplingParams], bool]
"""Whether a GPU can sample for a request without the host's knowing the tokens before."""


class AheadDraft(Draft):
    """What runs once the step `before` is over: decodes with tokens that nobody here knows yet, the next chunks of
    prompts, and newcomers, who join with the plan of `before`. It puts nobody out."""

    def __init__(self, limits: Limits, before: Draft, may_launch: MayLaunch) -> None:
        super().__init__(limits)
        self.joins, self.grants = before.joins, before.grants
        self.is_impossible = False
        """Pages are short, or somebody may join who cannot sample ahead: that is for a plan of its own."""
        self._begun = {run.row: run.num_tokens for run in before.runs}
        self._may_launch = may_launch

    @property
    def is_full(self) -> bool:
        return self.is_impossible or super().is_full

    def begun(self, request: Request) -> int:
        return self._begun.get(request.row, 0)

    def pending(self, request: Request) -> int:
        """Whoever samples in the step before has one token more by then, or has ended with it for certain; who ends
        otherwise is passed over."""
        left = request.num_pending - self._begun.get(request.row, 0)
        return left or int(len(request.output_token_ids) + 1 < request.max_tokens)

    def may_join(self, request: Request) -> bool:
        if not self._may_launch(request.params):
            self.is_impossible = True
        return not self.is_impossible

    def may_preempt(self) -> bool:
        self.is_impossible = True
        return False


def may_follow(draft: Draft, rows: Sequence[Request | None], may_launch: MayLaunch) -> bool:
    """Whether the step after the one of `draft` may begin before its tokens are known. Not where it has none: nobody
    waits for it, so that the next plan comes as early. `rows`: the requests that have them."""
    if not all((who := rows[join.row]) and may_launch(who.params) for join in draft.joins):
        return False
    return any((who := rows[run.row]) and run.num_tokens >= who.num_pending for run in draft.runs)
