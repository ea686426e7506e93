"""StepBuilder: a step while it is put together, within its budgets of tokens and of rows of logits."""

from __future__ import annotations

from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.plan import Run
from allspan.worker.scheduler.request import Request
from allspan.worker.step.rank_drafter import DraftRun


class StepBuilder:
    """`budget` tokens and `logits` rows of logits are left; a request gets `most_chunk` tokens at most."""

    def __init__(self, limits: Limits, is_ahead: bool = False) -> None:
        """`is_ahead`: other steps are in flight."""
        self.is_ahead = is_ahead
        self.budget = limits.max_num_batched_tokens
        self.most_chunk = limits.max_chunk_tokens
        self.logits = limits.max_logits_rows
        self.runs: list[Run] = []
        self.requests: list[Request] = []
        """The requests of the runs."""
        self.sampled: list[Request] = []
        """The requests that get a token in this step."""
        self.drafts: dict[int, tuple[int, ...]] = {}
        """Row → the last tokens of its run, which are only proposed."""
        self.draft_runs: list[DraftRun] = []
        """What a drafter in the ranks does behind the step."""
        self.has_preempted = False
        self.must_wait = False
        """A step ahead that cannot be planned before those in flight are over."""
        self._most_tokens = limits.max_num_batched_tokens
        self._shares = [self._most_tokens] * limits.attention_ranks
        """Tokens that each attention rank may still be given."""
        self._prompts: list[Request] = []
        """The requests that were to be prefilled."""

    @property
    def is_full(self) -> bool:
        return self.budget <= 0 or self.logits <= 0 or self.must_wait

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return self._most_tokens - self.budget

    def decode(self, request: Request, run: Run) -> None:
        """One token of a request, of which it is the last."""
        self._add(request, run, samples=True)
        self.budget -= 1
        self.logits -= 1

    def share_out(self) -> None:
        """Divides what is left of the budget evenly among the attention ranks: they wait for the one that has most."""
        self._shares = [-(-self.budget // len(self._shares))] * len(self._shares)

    def fill_up(self) -> None:
        """Gives what ranks have left of their shares to prompts that could have more, in their order."""
        if len(self._shares) == 1:
            return
        prompts, self._prompts = self._prompts, []
        self._shares = [self._most_tokens] * len(self._shares)
        for request in prompts:
            if request.row >= 0 and request not in self.sampled and self.budget > 0:
                self._take_back(request)
                self.prefill(request)

    def prefill(self, request: Request) -> None:
        """Adds as many of the request's tokens as the budgets allow, if any."""
        self._prompts.append(request)
        pending = request.num_pending
        count = min(pending, self.budget, self.most_chunk, self._shares[request.owner])
        rows = _rows_of_logits(request, count, pending)
        while count > 0 and rows > self.logits:
            count -= rows - self.logits
            rows = _rows_of_logits(request, count, pending)
        if count > 0:
            self._add(request, Run(request.row, count), samples=count >= pending)
            self.budget -= count
            self.logits -= rows
            self._shares[request.owner] -= count

    @property
    def room(self) -> int:
        """Tokens that can still be run and sampled."""
        return min(self.budget, self.logits)

    def draft(self, index: int, drafts: tuple[int, ...]) -> None:
        """Adds drafts to the decode that is the run at `index`."""
        run = self.runs[index]
        self.runs[index] = Run(run.row, run.num_tokens + len(drafts))
        self.requests[index].num_in_flight += len(drafts)
        self.drafts[run.row] = drafts
        self.budget -= len(drafts)
        self.logits -= len(drafts)

    def leave_out(self, request: Request) -> None:
        """Takes out the run of a request that is preempted, if it has one. What it had of the budgets stays unused: the
        pages of others were seen to for no more than was left then."""
        if request in self.requests:
            index = self.requests.index(request)
            del self.runs[index], self.requests[index]
        if request in self.sampled:
            self.sampled.remove(request)

    def withdraw(self) -> None:
        """Takes all runs out again."""
        for request, run in zip(self.requests, self.runs, strict=True):
            request.num_in_flight -= run.num_tokens
        for request in self.sampled:
            request.num_unknown -= 1
        for part in (self.runs, self.requests, self.sampled):
            part.clear()

    def _take_back(self, request: Request) -> None:
        """Takes out the run of a prompt that samples nothing, if it has one."""
        if request in self.requests:
            index = self.requests.index(request)
            run = self.runs.pop(index)
            del self.requests[index]
            request.num_in_flight -= run.num_tokens
            self.budget += run.num_tokens
            self.logits += _rows_of_logits(request, run.num_tokens, request.num_pending)

    def _add(self, request: Request, run: Run, samples: bool) -> None:
        self.runs.append(run)
        self.requests.append(request)
        request.num_in_flight += run.num_tokens
        if samples and not request.options.pooling:
            self.sampled.append(request)
            request.num_unknown += 1


def _rows_of_logits(request: Request, count: int, pending: int) -> int:
    """Rows of logits for the request's next `count` of `pending` tokens: one to sample after its last token, one for
    each prompt token that follows and whose log-probability is asked for. Pooling reads what the head would."""
    if request.options.pooling == "mean":
        return count
    if request.options.pooling == "cls":
        return int(not request.num_scheduled)
    rows = int(count >= pending)
    if request.wants_prompt_logprobs:
        start, last = request.num_scheduled, len(request.prompt_token_ids) - 1
        rows += max(0, min(start + count, last) - start)
    return rows
