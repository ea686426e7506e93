"""Scheduler: decides, on the leader alone, what runs in each step. Pure Python: it counts tokens and pages, no more.

A step has one budget of tokens. Running requests that need one token come first (decodes), then prefill chunks and
newcomers, by priority (lower first) and by arrival: however long a prompt is, a step with a chunk of it is no longer
than the budget, and every decode is in it. A newcomer is given the pages of all its tokens at once, so only decodes
ever run out of pages; then the running request of the worst priority, of those the youngest, makes room: it leaves, and
joins again later with its output kept. Its full pages stay in the prefix cache as long as there is place, so that it
finds them there, on the device or in the host tier; else they are computed again. A waiting request that goes before a
running one by priority may put it out too. Whoever stands first is never put out, and every request fits the whole
pool alone, so there is always progress. (Continuous batching: Yu et al., Orca, OSDI 2022; paged KV and recomputation:
Kwon et al., SOSP 2023; chunks beside decodes: Agrawal et al., Sarathi-Serve, OSDI 2024.)
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence

from allspan.protos.api.errors import AllspanError, AlreadyExists, DeadlineExceeded, InternalError, QueueFull
from allspan.protos.api.results import Output
from allspan.worker.cache.page_pool import PagePool
from allspan.worker.cache.prefix_cache import Match
from allspan.worker.sampling.failure import failure
from allspan.worker.scheduler.counters import Rate, SchedulerCounters
from allspan.worker.scheduler.finish import finish, timings
from allspan.worker.scheduler.invariants import Books, check_books
from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.lookahead import AheadDraft, MayLaunch, may_follow
from allspan.worker.scheduler.page_manager import Memory, PrefixSettings
from allspan.worker.scheduler.plan import Grant, Join, Operation, Run, StepPlan, StepResult
from allspan.worker.scheduler.request import Request, RequestStatus
from allspan.worker.scheduler.step_builder import Draft
from allspan.worker.scheduler.waiting import Deadlines, WaitingQueue

Outcome = tuple[Request, Output | AllspanError]
"""News of a request, or the error that ended it."""


class Scheduler:
    """`schedule()` makes a plan, `apply(result)` takes in what it made; the two alternate. Not thread-safe."""

    def __init__(
        self,
        limits: Limits,
        eos_token_ids: Iterable[int] = (),
        epoch: int = 1,
        prefix: PrefixSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefix` None: no prefix cache."""
        self.limits = limits
        self.memory = Memory(limits.page_size, limits.num_pages, prefix or PrefixSettings())
        self.counters = SchedulerCounters()
        self._prompt_rate, self._generation_rate = Rate(), Rate()
        self._eos = frozenset(eos_token_ids)
        self._epoch = epoch
        self._clock = clock
        self._step = self._tokens_hash = self._arrivals = 0
        self._requests: dict[bytes, Request] = {}
        self._waiting = WaitingQueue()
        self._deadlines = Deadlines()
        self._running: list[Request] = []
        """By priority, then by arrival: the last one makes room."""
        self._rows: list[Request | None] = [None] * limits.max_num_seqs
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._decodes = [Run(row, 1) for row in range(limits.max_num_seqs)]
        self._leaves: list[int] = []
        self._drops: list[bytes] = []
        self._in_flight: StepPlan | None = None
        self._ahead: list[tuple[Request, Run]] = []
        """What runs already in the next step."""

    @property
    def pool(self) -> PagePool:
        """The device's pages."""
        return self.memory.cache.device

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

    def tokens_per_s(self) -> tuple[float, float]:
        """Prompt tokens that were taken in and tokens that were generated, of late."""
        now = self._clock()
        return self._prompt_rate.per_second(now), self._generation_rate.per_second(now)

    def submit(self, request: Request) -> None:
        """Takes a request in. Raises InvalidRequest, AlreadyExists or QueueFull; then nothing has changed."""
        if request.request_id in self._requests:
            raise AlreadyExists(f"request_id {request.request_id.hex()} is in use; choose another")
        self.limits.admit(request)
        if len(self._waiting) >= self.limits.max_queued_requests:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting, max_queued_requests is "
                f"{self.limits.max_queued_requests}; try again in a second or later"
            )
        request.arrived_at, request.arrived_wall = self._clock(), time.time()
        request.order = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)
        if request.options.timeout_s is not None:
            self._deadlines.add(request, request.arrived_at + request.options.timeout_s)

    def cancel(self, request_id: bytes) -> Outcome | None:
        """Ends a request in any state: its pages are free at once, its row with the next plan. None: not known."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, RequestStatus.CANCELLED)
        return request, Output(finish_reason="cancelled", timings=timings(request, self._clock()))

    def expire(self) -> list[Outcome]:
        """Ends the requests whose time is over, with DeadlineExceeded."""
        if not self._deadlines:
            return []
        outcomes: list[Outcome] = []
        for request in self._deadlines.pop_expired(self._clock(), self._requests):
            where = "running" if request.row >= 0 else "waiting"
            self._end(request, RequestStatus.FAILED)
            message = (
                f"timeout_s is {request.options.timeout_s:g}: the request was still {where} then, with "
                f"{len(request.output_token_ids)} of {request.max_tokens} tokens; allow more time, or ask for less"
            )
            outcomes.append((request, DeadlineExceeded(message)))
        return outcomes

    def abandon(self, error: AllspanError) -> list[Outcome]:
        """Ends every request with `error`: there will be no further step."""
        requests = self.requests()
        for request in requests:
            self._end(request, RequestStatus.FAILED)
        return [(request, error) for request in requests]

    def schedule(self, operation: Operation = Operation.NONE, may_launch: MayLaunch | None = None) -> StepPlan | None:
        """The next step, or None when there is nothing to do. `apply` must be called with its result. A step with an
        operation runs no tokens. `may_launch` None: the plan never has the step after."""
        if self._in_flight is not None:
            raise InternalError(f"step {self._in_flight.step} is still in flight")
        self.memory.cache.settle()
        draft = Draft(self.limits)
        ahead: tuple[Run, ...] = ()
        if operation is Operation.NONE:
            self._fill(draft)
            if not (draft.runs or self._leaves or self._drops):
                return None
            if may_launch is not None:
                ahead = self._go_ahead(draft, may_launch)
        self._ahead = [(request, run) for run in ahead if (request := self._rows[run.row])]
        self._step += 1
        saves, loads = self.memory.cache.take_copies()
        plan = StepPlan(
            epoch=self._epoch,
            step=self._step,
            tokens_hash=self._tokens_hash,
            leaves=tuple(self._leaves),
            drops=tuple(self._drops),
            joins=tuple(draft.joins),
            grants=tuple(draft.grants),
            saves=saves,
            loads=loads,
            runs=tuple(draft.runs),
            ahead=ahead,
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
        self.counters.count_step(plan.runs)
        now = self._clock()
        before = self.counters.generated_tokens
        outcomes: list[Outcome] = []
        for run in plan.runs:
            request = self._rows[run.row]
            if request is None:
                continue
            request.num_computed += run.num_tokens
            self.memory.has_computed(request)
            tokens = result.tokens.get(run.row, ())
            if tokens or run.row in result.prompt_logprobs:
                news = self._extend(request, run, tokens, result, now)
                if news is not None:
                    outcomes.append((request, news))
        self._generation_rate.count(now, self.counters.generated_tokens - before)
        return outcomes

    def _fill(self, draft: Draft) -> None:
        if self._ahead:  # it runs already, so nobody can join
            draft.runs += [run for request, run in self._ahead if request.row >= 0]
            return
        self._yield_to_better()
        self._schedule_prefills(self._schedule_decodes(draft), draft)

    def _go_ahead(self, draft: Draft, may_launch: MayLaunch) -> tuple[Run, ...]:
        """The step after the one of `draft`, as far as it can be known; none where a plan of its own is due."""
        if not may_follow(draft, self._rows, may_launch):
            return ()
        after = AheadDraft(self.limits, draft, may_launch)
        self._schedule_prefills(self._schedule_decodes(after), after)
        outranked = self._waiting and self._waiting[0].options.priority < self._running[-1].options.priority
        return () if after.is_impossible or outranked else tuple(after.runs)

    def _yield_to_better(self) -> None:
        """Makes place for the first waiting request that goes before a running one by priority and finds none."""
        for i in range(min(len(self._waiting), len(self._rows))):
            request = self._waiting[i]
            if not self._running or self._running[-1].options.priority <= request.options.priority:
                return
            match = self.memory.match(request)
            if match is None:
                continue
            worse = [r for r in self._running if r.options.priority > request.options.priority]
            # Were all of them put out in vain, nothing would be gained.
            spare = len(self._running) - sum(len(r.pages) + 1 for r in worse)
            if self.memory.fits(request, match, spare):
                while worse and not self._has_place(request, match):
                    self._preempt(worse.pop())
            return

    def _schedule_decodes(self, draft: Draft) -> list[Request]:
        """Returns the running requests that have more than one token to compute."""
        prefills = []
        for request in tuple(self._running):
            pending = draft.pending(request)
            if pending > 1:
                prefills.append(request)
            elif pending and request.row >= 0 and self._make_room(request, draft):
                draft.decode(self._decodes[request.row])
        return prefills

    def _schedule_prefills(self, prefills: Sequence[Request], draft: Draft) -> None:
        """Chunks of running requests, and newcomers between them, each in its place."""
        for request in prefills:
            self._admit(draft, request.options.priority)
            if draft.is_full:
                return
            if request.row >= 0:  # else a decode has put it out
                draft.prefill(request)
        self._admit(draft, None)

    def _admit(self, draft: Draft, before: int | None) -> None:
        """Lets waiting requests in, those that go before priority `before` alone, while there is place. Whoever finds
        none holds up those behind it, but who waits for pages that are being computed does not, unless there are as
        many of them as there are rows."""
        index = 0
        while (
            index < min(len(self._waiting), len(self._rows))
            and self._free_rows
            and not (draft.is_full or draft.has_preempted)
        ):
            request = self._waiting[index]
            if before is not None and request.options.priority >= before:
                return
            match = self.memory.match(request)
            if match is None:
                index += 1
                continue
            if not (self._has_place(request, match) and draft.may_join(request)):
                return
            self._waiting.remove(request)
            self._join(request, match, draft)
            draft.prefill(request)

    def _has_place(self, request: Request, match: Match) -> bool:
        """A row is free, and so are the pages, with one left for each running request, else the newcomer would soon
        have to make room again. Rows that leave in this plan are free in it."""
        return bool(self._free_rows) and self.memory.fits(request, match, len(self._running))

    def _join(self, request: Request, match: Match, draft: Draft) -> None:
        now = self._clock()
        if request.status is RequestStatus.WAITING:
            self._count_join(request, match, now)
        request.move(RequestStatus.RUNNING)
        request.row = self._free_rows.pop()
        self._rows[request.row] = request
        insort(self._running, request, key=_place)
        self.memory.join(request, match)
        draft.grants.append(Grant(request.row, tuple(request.pages)))
        draft.joins.append(
            Join(
                row=request.row,
                request_id=request.request_id,
                digest=request.digest(),
                num_computed=request.num_computed,
                num_output=len(request.output_token_ids),
            )
        )

    def _count_join(self, request: Request, match: Match, now: float) -> None:
        """The first time that a request runs. What it finds when it comes back is not counted."""
        prompt, size = len(request.prompt_token_ids), self.limits.page_size
        request.started_at = now
        request.cached_tokens = min(match.num_pages * size, prompt)
        request.host_cached_tokens = min(match.num_host_pages * size, prompt)
        self.counters.prompt_tokens += prompt
        self._prompt_rate.count(now, prompt)
        if self.memory.looks_up(request):
            self.counters.prefix_query_tokens += prompt
            self.counters.prefix_hit_tokens += request.cached_tokens
            self.counters.prefix_host_hit_tokens += request.host_cached_tokens

    def _make_room(self, request: Request, draft: Draft) -> bool:
        """Sees to a page for the next token. False when the request had to leave for want of one."""
        if self.memory.has_room(request, draft.begun(request) + 1):
            return True
        while (pages := self.memory.extend(request)) is None:
            if not draft.may_preempt():
                return False
            victim = self._running[-1]
            self._preempt(victim)
            draft.has_preempted = True
            if victim is request:
                return False
        draft.grants.append(Grant(request.row, pages))
        return True

    def _preempt(self, request: Request) -> None:
        """It waits again, in the place that it had."""
        request.move(RequestStatus.PREEMPTED)
        self._vacate(request)
        request.preemptions += 1
        self._waiting.add(request)
        self.counters.preemptions += 1

    def _vacate(self, request: Request) -> None:
        self._running.remove(request)
        self._rows[request.row] = None
        self._free_rows.append(request.row)
        self._leaves.append(request.row)
        request.row = -1
        self.memory.release(request)

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.row >= 0:
            self._vacate(request)
        else:
            self._waiting.remove(request)
        request.move(status)
        del self._requests[request.request_id]
        self._drops.append(request.request_id)
        self.counters.finished_requests += 1
        self.counters.cancelled_requests += status is RequestStatus.CANCELLED
        self.counters.failed_requests += status is RequestStatus.FAILED

    def _extend(
        self, request: Request, run: Run, tokens: tuple[int, ...], result: StepResult, now: float
    ) -> Output | AllspanError | None:
        if tokens and tokens[-1] < 0:
            failed = failure(tokens[-1], request.num_tokens)
            self._end(request, RequestStatus.FAILED if failed else RequestStatus.FINISHED)
            return failed or Output(finish_reason="stop", timings=timings(request, now))
        # A request that was put out in the midst of its prompt goes through the beginning again: it is told once.
        before = request.num_computed - run.num_tokens
        prompt_logprobs = result.prompt_logprobs.get(run.row, ())[max(0, request.num_prompt_logprobs - before) :]
        request.num_prompt_logprobs += len(prompt_logprobs)
        if not tokens:
            return Output(prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        is_first = not request.first_token_at
        if is_first:
            request.first_token_at = now
        request.output_token_ids.extend(tokens)
        self.counters.generated_tokens += len(tokens)
        reason, stop_token_id = finish(request, self._eos)
        if reason:
            self._end(request, RequestStatus.FINISHED)
        told = timings(request, now) if reason or is_first else None
        return Output(tokens, result.logprobs.get(run.row, ()), reason, stop_token_id, told, prompt_logprobs)

    def check(self) -> None:
        """Raises InternalError unless pages, rows, queue and states agree. For tests and idle moments."""
        self.memory.check(self._running)
        check_books(Books(self._running, self._waiting.requests(), self._rows, self._free_rows), self._requests, _place)


def _place(request: Request) -> tuple[int, int]:
    return request.options.priority, request.order
