"""Scheduler: decides, on the leader alone, what runs in each step. Pure Python: it counts tokens and pages, no more.

A step has one budget of tokens. Running requests that need one token come first (decodes), then prefill chunks, oldest
request first, then newcomers in the order of their arrival. A newcomer is given the pages of all its tokens at once,
so only decodes ever run out of pages; then the youngest running request makes room: it leaves, and joins again later
with its output kept and its KV recomputed. The oldest is never put out, and every request fits the whole pool alone, so
there is always progress. (Continuous batching: Yu et al., Orca, OSDI 2022; paged KV and recomputation: Kwon et al.,
SOSP 2023; chunks beside decodes: Agrawal et al., Sarathi-Serve, OSDI 2024.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from allspan.protos.errors import AllspanError, AlreadyExists, InternalError, QueueFull
from allspan.protos.results import Output, RequestTimings
from allspan.worker.cache.budget import pages_of
from allspan.worker.cache.page_pool import PagePool
from allspan.worker.sampling.failure import failure
from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.plan import Grant, Join, Operation, Run, StepPlan, StepResult
from allspan.worker.scheduler.request import Request, RequestStatus

Outcome = tuple[Request, Output | AllspanError]
"""New tokens of a request, or the error that ended it."""

_ENDED = (RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED)


@dataclass(slots=True)
class SchedulerCounters:
    """Since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    preemptions: int = 0
    steps: int = 0


@dataclass(slots=True)
class _Draft:
    """A step while it is put together."""

    budget: int
    joins: list[Join] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    has_preempted: bool = False

    def run(self, request: Request, num_tokens: int) -> None:
        self.runs.append(Run(request.row, num_tokens))
        self.budget -= num_tokens


class Scheduler:
    """`schedule()` makes a plan, `apply(result)` takes in what it made; the two alternate. Not thread-safe."""

    def __init__(
        self,
        limits: Limits,
        eos_token_ids: Iterable[int] = (),
        epoch: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.pool = PagePool(limits.num_pages)
        self.counters = SchedulerCounters()
        self._eos = frozenset(eos_token_ids)
        self._epoch = epoch
        self._clock = clock
        self._step = 0
        self._tokens_hash = 0
        self._arrivals = 0
        self._requests: dict[bytes, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._rows: list[Request | None] = [None] * limits.max_num_seqs
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._leaves: list[int] = []
        self._drops: list[bytes] = []
        self._in_flight: StepPlan | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """False: `schedule()` would return None."""
        return bool(self._requests or self._leaves or self._drops)

    def requests(self) -> tuple[Request, ...]:
        """Those that have not ended, oldest first."""
        return tuple(self._requests.values())

    def submit(self, request: Request) -> None:
        """Takes a request in. Raises InvalidRequest, AlreadyExists or QueueFull; then nothing has changed."""
        if request.request_id in self._requests:
            raise AlreadyExists(f"request_id {request.request_id.hex()} is in use; choose another")
        self.limits.admit(request)
        if len(self._waiting) >= self.limits.max_queued_requests:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting, max_queued_requests is "
                f"{self.limits.max_queued_requests}; try again later"
            )
        request.arrived_at = self._clock()
        request.order = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def cancel(self, request_id: bytes) -> Outcome | None:
        """Ends a request in any state: its pages are free at once, its row with the next plan. None: not known."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, RequestStatus.CANCELLED)
        return request, Output(finish_reason="cancelled", timings=self._timings(request))

    def abandon(self, error: AllspanError) -> list[Outcome]:
        """Ends every request with `error`: there will be no further step."""
        requests = self.requests()
        for request in requests:
            self._end(request, RequestStatus.FAILED)
        return [(request, error) for request in requests]

    def schedule(self, operation: Operation = Operation.NONE) -> StepPlan | None:
        """The next step, or None when there is nothing to do. `apply` must be called with its result. A step with an
        operation runs no tokens."""
        if self._in_flight is not None:
            raise InternalError(f"step {self._in_flight.step} is still in flight")
        draft = _Draft(self.limits.max_num_batched_tokens)
        if operation is Operation.NONE:
            self._schedule_decodes(draft)
            self._schedule_prefills(draft)
            if not draft.has_preempted:
                self._admit_waiting(draft)
            if not (draft.runs or self._leaves or self._drops):
                return None
        self._step += 1
        plan = StepPlan(
            epoch=self._epoch,
            step=self._step,
            tokens_hash=self._tokens_hash,
            leaves=tuple(self._leaves),
            drops=tuple(self._drops),
            joins=tuple(draft.joins),
            grants=tuple(draft.grants),
            runs=tuple(draft.runs),
            operation=operation,
        )
        self._leaves.clear()
        self._drops.clear()
        self._in_flight = plan
        return plan

    def apply(self, result: StepResult) -> list[Outcome]:
        """Takes in what the step in flight made. Requests that ended meanwhile are passed over."""
        plan = self._in_flight
        if plan is None or plan.step != result.step:
            raise InternalError(f"a result for step {result.step}, in flight is {plan and plan.step}")
        self._in_flight = None
        self._tokens_hash = result.tokens_hash
        self.counters.steps += 1
        outcomes: list[Outcome] = []
        for run in plan.runs:
            request = self._rows[run.row]
            if request is None:
                continue
            request.num_computed += run.num_tokens
            tokens = result.tokens.get(run.row)
            if tokens is not None:
                outcomes.append((request, self._extend(request, tokens, result)))
        return outcomes

    def _schedule_decodes(self, draft: _Draft) -> None:
        for request in list(self._running):
            if request.num_pending == 1 and request.row >= 0 and self._make_room(request, draft):
                draft.run(request, 1)

    def _schedule_prefills(self, draft: _Draft) -> None:
        for request in self._running:
            if request.num_pending > 1 and draft.budget > 0:
                draft.run(request, min(request.num_pending, draft.budget))

    def _admit_waiting(self, draft: _Draft) -> None:
        while self._waiting and draft.budget > 0:
            request = self._waiting[0]
            needed = pages_of(request.num_tokens, self.limits.page_size)
            # A page is left for each running row, else the newcomer would soon have to make room again. Rows that leave
            # in this plan are free in it.
            if not self._free_rows or needed + len(self._running) > self.pool.num_free:
                return
            self._waiting.popleft()
            self._join(request, draft)
            self._grant(request, needed, draft)
            draft.run(request, min(request.num_pending, draft.budget))

    def _join(self, request: Request, draft: _Draft) -> None:
        if request.status is RequestStatus.WAITING:
            request.started_at = self._clock()
            self.counters.prompt_tokens += len(request.prompt_token_ids)
        request.move(RequestStatus.RUNNING)
        request.row = self._free_rows.pop()
        self._rows[request.row] = request
        self._running.append(request)
        draft.joins.append(
            Join(request.row, request.request_id, request.digest(), num_output=len(request.output_token_ids))
        )

    def _make_room(self, request: Request, draft: _Draft) -> bool:
        """Sees to a page for the next token. False when the request had to leave for want of one."""
        if request.num_computed < len(request.pages) * self.limits.page_size:
            return True
        while self.pool.num_free == 0:
            victim = self._running[-1]
            self._preempt(victim)
            draft.has_preempted = True
            if victim is request:
                return False
        self._grant(request, 1, draft)
        return True

    def _grant(self, request: Request, count: int, draft: _Draft) -> None:
        pages = self.pool.allocate(count)
        request.pages.extend(pages)
        draft.grants.append(Grant(request.row, pages))

    def _preempt(self, request: Request) -> None:
        """All that run are older than all that wait, so the youngest of them goes to the queue's head."""
        request.move(RequestStatus.PREEMPTED)
        self._vacate(request)
        request.num_computed = 0
        self._waiting.appendleft(request)
        self.counters.preemptions += 1

    def _vacate(self, request: Request) -> None:
        self._running.remove(request)
        self._rows[request.row] = None
        self._free_rows.append(request.row)
        self._leaves.append(request.row)
        request.row = -1
        self.pool.release(request.pages)
        request.pages.clear()

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.row >= 0:
            self._vacate(request)
        else:
            self._waiting.remove(request)
        request.move(status)
        del self._requests[request.request_id]
        self._drops.append(request.request_id)
        self.counters.finished_requests += 1

    def _extend(self, request: Request, tokens: tuple[int, ...], result: StepResult) -> Output | AllspanError:
        if tokens[-1] < 0:
            self._end(request, RequestStatus.FAILED)
            return failure(tokens[-1], request.num_tokens)
        row = request.row
        if not request.output_token_ids:
            request.first_token_at = self._clock()
        request.output_token_ids.extend(tokens)
        self.counters.generated_tokens += len(tokens)
        logprobs = result.logprobs.get(row, ())
        last = tokens[-1]
        is_stop = (last in self._eos and not request.params.ignore_eos) or last in request.params.stop_token_ids
        if not is_stop and len(request.output_token_ids) < request.max_tokens:
            return Output(tokens, logprobs)
        self._end(request, RequestStatus.FINISHED)
        reason = "stop" if is_stop else "length"
        return Output(tokens, logprobs, reason, last if is_stop else None, self._timings(request))

    def _timings(self, request: Request) -> RequestTimings:
        now = self._clock()
        return RequestTimings(
            queue_s=(request.started_at or now) - request.arrived_at,
            ttft_s=request.first_token_at - request.arrived_at if request.output_token_ids else 0.0,
            total_s=now - request.arrived_at,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=len(request.output_token_ids),
        )

    def check(self) -> None:
        """Raises InternalError unless pages, rows, queue and states agree. For tests and idle moments."""
        self.pool.check()
        held = [page for request in self._running for page in request.pages]
        in_rows = [request for request in self._rows if request is not None]
        orders = [request.order for request in (*self._running, *self._waiting)]
        rules = {
            "each used page belongs to one running request": len(set(held)) == len(held) == self.pool.num_used,
            "running requests have the rows": {id(r) for r in in_rows} == {id(r) for r in self._running},
            "rows are free or taken": sorted(self._free_rows) == [i for i, r in enumerate(self._rows) if r is None],
            "who runs is older than who waits": orders == sorted(orders),
            "nobody is lost": len(orders) == len(self._requests),
            "no ended request is kept": all(r.status not in _ENDED for r in self._requests.values()),
            "what is computed has pages": all(
                r.num_computed <= len(r.pages) * self.limits.page_size and r.num_computed < r.num_tokens
                for r in self._running
            ),
            "who waits holds nothing": not any(r.pages or r.row >= 0 or r.num_computed for r in self._waiting),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise InternalError(f"the scheduler is inconsistent: {'; '.join(broken)}")
