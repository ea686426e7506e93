"""Draft: a step while it is put together, within its budgets of tokens and of rows of logits."""

from __future__ import annotations

from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.plan import Grant, Join, Run
from allspan.worker.scheduler.request import Request


class Draft:
    """`budget` tokens and `logits` rows of logits are left."""

    def __init__(self, limits: Limits) -> None:
        self.budget = limits.max_num_batched_tokens
        self.logits = limits.max_logits_rows
        self.joins: list[Join] = []
        self.grants: list[Grant] = []
        self.runs: list[Run] = []
        self.has_preempted = False

    @property
    def is_full(self) -> bool:
        return self.budget <= 0 or self.logits <= 0

    def begun(self, request: Request) -> int:
        """So many tokens of the request are computed before this step, beside those that are known to be."""
        return 0

    def pending(self, request: Request) -> int:
        """Tokens of the request whose KV is still to be computed when this step begins; 1 is a decode, 0: it has
        ended."""
        return request.num_pending

    def may_join(self, request: Request) -> bool:
        """Whether a newcomer may run in this step."""
        return True

    def may_preempt(self) -> bool:
        """Whether somebody may be put out for this step."""
        return True

    def decode(self, run: Run) -> None:
        """One token of a row, of which it is the last."""
        self.runs.append(run)
        self.budget -= 1
        self.logits -= 1

    def prefill(self, request: Request) -> None:
        """As many of the request's tokens as the budgets allow, if any."""
        count = min(self.pending(request), self.budget)
        rows = self._rows_of_logits(request, count)
        while count > 0 and rows > self.logits:
            count -= rows - self.logits
            rows = self._rows_of_logits(request, count)
        if count > 0:
            self.runs.append(Run(request.row, count))
            self.budget -= count
            self.logits -= rows

    def _rows_of_logits(self, request: Request, count: int) -> int:
        """How many the request's next `count` tokens need: one to sample after its last token, one for each prompt
        token that follows and whose log-probability is asked for."""
        rows = int(count >= self.pending(request))
        if request.wants_prompt_logprobs:
            start, last = request.num_computed + self.begun(request), len(request.prompt_token_ids) - 1
            rows += max(0, min(start + count, last) - start)
        return rows
