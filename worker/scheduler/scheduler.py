"""Scheduler: decides, on the leader alone, what runs in each step. Pure Python: it counts tokens and pages, no more.

A step has one budget of tokens. Running requests that need one token come first (decodes), then prefill chunks and
newcomers, by priority (lower first) and by arrival: however long a prompt is, a step with a chunk of it is no longer
than the budget, and every decode is in it. A newcomer is given the pages of all its tokens at once, so only decodes
ever run out of pages; then the running request of the worst priority, of those the youngest, makes room: it leaves, and
joins again later with its output kept. Its full pages stay in the prefix cache as long as there is place, so that it
finds them there, on the device or in the host tier; else they are computed again. A waiting request that goes before a
running one by priority may preempt it too. The first request is never preempted, and every request fits the whole
pool alone, so there is always progress. (Continuous batching: Yu et al., Orca, OSDI 2022; paged KV and recomputation:
Kwon et al., SOSP 2023; chunks beside decodes: Agrawal et al., Sarathi-Serve, OSDI 2024.)
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence

from allspan.protos.api.errors import AllspanError, AlreadyExists, InternalError, QueueFull
from allspan.protos.api.results import Output
from allspan.worker.scheduler.adapter_table import AdapterTable
from allspan.worker.scheduler.counters import SchedulerCounters
from allspan.worker.scheduler.drafting.drafting import Drafting
from allspan.worker.scheduler.finish import NO_TOKEN, ONE_TOKEN, append, outputs_of, timed_out, timings, vector_end
from allspan.worker.scheduler.invariants import Standing, check_standing
from allspan.worker.scheduler.limits import Limits
from allspan.worker.scheduler.lookahead import Flight, Lookahead
from allspan.worker.scheduler.next_plan import NextPlan
from allspan.worker.scheduler.owned_pages import page_memory
from allspan.worker.scheduler.page_manager import PrefixHit, PrefixSettings
from allspan.worker.scheduler.plan import Join, Operation, StepPlan, StepResult
from allspan.worker.scheduler.request import Request, RequestStatus
from allspan.worker.scheduler.slots import Slots
from allspan.worker.scheduler.step_builder import StepBuilder
from allspan.worker.scheduler.waiting import Deadlines, WaitingQueue

Outcome = tuple[Request, Output | AllspanError]
"""What is new of a request, or the error that ended it."""


class Scheduler:
    """`schedule()` makes a plan, `apply(result)` takes in what the oldest one in flight made; without lookahead the two
    alternate. Not thread-safe."""

    def __init__(
        self,
        limits: Limits,
        eos_token_ids: Iterable[int] = (),
        epoch: int = 1,
        prefix: PrefixSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        lookahead: Lookahead | None = None,
    ) -> None:
        """`prefix` None: no prefix cache. `lookahead` None: every step is planned when the one before is over."""
        self.limits = limits
        self.memory = page_memory(limits, prefix or PrefixSettings())
        self.adapters = AdapterTable(limits.row_inputs.num_adapters, clock)
        self.lookahead = Lookahead() if lookahead is None else lookahead
        self.counters = SchedulerCounters()
        self._eos = frozenset(eos_token_ids)
        self._clock = clock
        self._next = NextPlan(epoch)
        self._arrivals = 0
        self._requests: dict[bytes, Request] = {}
        self._waiting = WaitingQueue()
        self._deadlines = Deadlines()
        self._running: list[Request] = []
        """Running requests by priority, then by arrival; the last one is preempted first."""
        self._slots = Slots(limits.max_num_seqs)
        self.drafting: Drafting | None = None
        """None: no drafts. Drafts begin with the last token, so a step is planned ahead while they would not pay."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """False: `schedule()` would return None, and nothing is in flight."""
        return bool(self._requests or self._next.has_ends or self.lookahead)

    def requests(self) -> tuple[Request, ...]:
        """Returns the requests that have not ended, oldest first."""
        return tuple(self._requests.values())

    def tokens_per_s(self) -> tuple[float, float]:
        """Prompt tokens that were taken in and tokens that were generated, over the last ten seconds or so."""
        return self.counters.throughput.per_second(self._clock())

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
        self.adapters.admit(request)
        request.arrived_at, request.arrived_wall = self._clock(), time.time()
        request.order, self._arrivals = self._arrivals, self._arrivals + 1
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
            outcomes.append((request, timed_out(request)))
            self._end(request, RequestStatus.FAILED)
        return outcomes

    def abandon(self, error: AllspanError) -> list[Outcome]:
        """Ends every request with `error`: there will be no further step."""
        requests = self.requests()
        for request in requests:
            self._end(request, RequestStatus.FAILED)
        return [(request, error) for request in requests]

    def schedule(self, operation: Operation = Operation.NONE, argument: bytes = b"") -> StepPlan | None:
        """The next step; `apply` must be called with its result. None when there is nothing to do, or nothing that can
        be planned before the steps in flight are over. A step with an operation runs no tokens, and none is in flight
        beside it."""
        in_flight = len(self.lookahead)
        if in_flight >= self.lookahead.depth:
            raise InternalError(f"{in_flight} steps are in flight, the most is {self.lookahead.depth}")
        waits = operation is not Operation.NONE or not self.lookahead.may_plan()
        if in_flight and (waits or (self.drafting and self.drafting.must_wait(self.memory, self._running))):
            return None
        self.memory.settle()
        step = StepBuilder(self.limits, is_ahead=in_flight > 0)
        if operation is Operation.NONE:
            self._fill(step)
            if not step.runs and (in_flight or not self._next.has_ends):
                return None
        copies, placements = self.memory.take_copies(), self.adapters.take_placements()
        plan = self._next.make(step, copies, in_flight, (operation, argument), placements)
        self.lookahead.launch(plan, step.requests, bool(step.sampled))
        return plan

    def apply(self, result: StepResult) -> list[Outcome]:
        """Takes in what the oldest step in flight made. Requests that ended meanwhile are passed over."""
        flight = self._land(result)
        self._next.tokens_hash = result.tokens_hash
        self.counters.count_step(flight.plan.runs)
        now = self._clock()
        before = self.counters.generated_tokens
        outcomes: list[Outcome] = []
        drafted, sampled, commit = dict(flight.plan.drafts), result.tokens, self.memory.commit_computed
        vectors = result.vectors
        for run, request in zip(flight.plan.runs, flight.requests, strict=True):
            if request.status is not RequestStatus.RUNNING:
                continue
            tokens, is_first = sampled.get(run.row, ()), not request.first_token_at
            end = vector_end(vectors[run.row]) if run.row in vectors else NO_TOKEN
            if tokens:
                request.num_unknown -= 1
                end = append(request, tokens, self._eos, now)
                self.counters.generated_tokens += end.count
            request.num_in_flight -= run.num_tokens
            request.num_computed += run.num_tokens
            if run.row in drafted:  # without the drafts that were not kept
                request.num_computed = min(request.num_computed, request.num_tokens - 1)
            commit(request)
            if run.row in drafted:
                self.memory.retract(request)
            if end is ONE_TOKEN and not (is_first or result.prompt_logprobs):
                outcomes.append((request, Output(tokens, result.logprobs.get(run.row, ())[:1])))
            elif tokens or end is not NO_TOKEN or run.row in result.prompt_logprobs:
                outcomes += [(request, news) for news in outputs_of(request, run, end, result, now)]
                if end.reason or end.error:
                    self._end(request, RequestStatus.FAILED if end.error else RequestStatus.FINISHED)
        if self.drafting and result.drafted:
            self.drafting.take(flight, result, self.memory)
        self.counters.throughput.generation.count(now, self.counters.generated_tokens - before)
        return outcomes

    def _land(self, result: StepResult) -> Flight:
        """The step in flight that this is the result of."""
        flight = self.lookahead.land(result.step)
        if flight is None:
            raise InternalError(f"a result for step {result.step}, which is not the oldest one in flight")
        if self.drafting:
            self.drafting.learn(flight, result, self.counters)
        return flight

    def _fill(self, step: StepBuilder) -> None:
        """Puts runs into the step. One that is ahead of others stays empty where these must be awaited."""
        if not step.is_ahead:
            self._yield_to_better()
        self._schedule_prefills(self._schedule_decodes(step), step)
        if step.is_ahead and (step.must_wait or self._is_outranked()):
            step.withdraw()
        if self.drafting:
            self._next.grants += self.drafting.fill(step, self.memory, self._running)

    def _is_outranked(self) -> bool:
        """Whether a waiting request goes before a running one by priority."""
        if not (self._waiting and self._running):
            return False
        return self._waiting[0].options.priority < self._running[-1].options.priority

    def _yield_to_better(self) -> None:
        """Preempts running requests for the first waiting one that goes before them by priority and finds no place."""
        for i in range(min(len(self._waiting), len(self._slots))):
            request = self._waiting[i]
            if not self._running or self._running[-1].options.priority <= request.options.priority:
                return
            if (hits := self._match(request)) is not None:
                self._preempt_for(request, hits)
                return

    def _preempt_for(self, request: Request, hits: Sequence[PrefixHit]) -> None:
        """Preempts running requests of a worse priority where that makes a place."""
        if any(self._has_place(request, hit) for hit in hits):
            return
        worse = [r for r in self._running if r.options.priority > request.options.priority]
        staying = self._running[: len(self._running) - len(worse)]
        # Were all of them preempted in vain, nothing would be gained.
        hit = next((hit for hit in hits if self.memory.fits(request, hit, staying, worse)), None)
        has_pages = hit is not None and self.memory.fits(request, hit, self._running)
        for victim in reversed(worse):
            if hit is None or self._has_place(request, hit):
                return
            if has_pages or victim.owner == hit.owner:
                self._preempt(victim)

    def _schedule_decodes(self, step: StepBuilder) -> list[Request]:
        """Returns the running requests that have more than one token to compute."""
        prefills, lookahead = [], self.lookahead
        most = lookahead.most_decodes(len(self._running))
        for request in tuple(self._running):
            pending = request.num_pending
            if pending > 1:
                prefills.append(request)
            elif len(step.runs) >= most or not lookahead.may_run(request):
                continue
            elif pending and request.row >= 0 and self._make_room(request, 1, step):
                step.decode(request, self._slots.decodes[request.row])
        return prefills

    def _schedule_prefills(self, prefills: Sequence[Request], step: StepBuilder) -> None:
        """Chunks of running requests, and newcomers between them, each in its place."""
        step.share_out()
        for request in prefills:
            self._admit(step, request.options.priority)
            if step.is_full:
                return
            # It may have been preempted for a decode. In a window its pages are those of the chunks before.
            most = min(request.num_pending, step.budget, step.most_chunk)
            if request.row >= 0 and self._make_room(request, most, step):
                step.prefill(request)
        self._admit(step, None)
        step.fill_up()

    def _admit(self, step: StepBuilder, before: int | None) -> None:
        """Lets waiting requests in, those that go before priority `before` alone, while there is place. A request that
        finds none holds up those behind it; one that waits for pages that are being computed, or for a slot for its
        adapter, does not, unless there are as many such requests as there are rows."""
        index = 0
        while (
            index < min(len(self._waiting), len(self._slots))
            and self._slots.free
            and not (step.is_full or step.has_preempted)
        ):
            request = self._waiting[index]
            if before is not None and request.options.priority >= before:
                return
            hits = self._match(request)
            if hits is None:
                index += 1
                continue
            hit = next((hit for hit in hits if self._has_place(request, hit)), None)
            if hit is None:
                return
            if not self.lookahead.may_join(request):
                step.must_wait = True
                return
            self._waiting.remove(request)
            self._join(request, hit)
            step.prefill(request)  # whose pages it has

    def _match(self, request: Request) -> tuple[PrefixHit, ...] | None:
        """What the cache has of it; None while it must wait for a page, or a slot for its adapter."""
        return self.memory.match(request) if self.adapters.may_join(request) else None

    def _has_place(self, request: Request, hit: PrefixHit) -> bool:
        """A row is free, and so are the pages, with one left for each running request, else the newcomer would soon
        have to make room again. Rows that leave in this plan are free in it."""
        return bool(self._slots.free) and self.memory.fits(request, hit, self._running)

    def _join(self, request: Request, hit: PrefixHit) -> None:
        now = self._clock()
        if request.status is RequestStatus.WAITING:
            self._count_join(request, hit, now)
        request.move(RequestStatus.RUNNING)
        self._slots.take(request)
        self.lookahead.join(request)
        insort(self._running, request, key=_place)
        self._next.grants += self.memory.join(request, hit)
        self._next.joins.append(
            Join(
                row=request.row,
                request_id=request.request_id,
                digest=request.digest(),
                num_computed=request.num_computed,
                num_output=len(request.output_token_ids),
                adapter=self.adapters.join(request),
                owner=request.owner,
            )
        )

    def _count_join(self, request: Request, hit: PrefixHit, now: float) -> None:
        """The first time that a request runs. What it finds when it comes back is not counted."""
        prompt, size = len(request.prompt_token_ids), self.limits.page_size
        request.started_at = now
        request.cached_tokens = min(hit.num_pages * size, prompt)
        request.host_cached_tokens = min(hit.num_host_pages * size, prompt)
        self.counters.throughput.prompt.count(now, prompt)
        self.counters.count_join(request, self.memory.looks_up(request))

    def _make_room(self, request: Request, count: int, step: StepBuilder) -> bool:
        """Sees to pages for the next `count` tokens. False when there are none: the request was preempted, or the step
        must wait for those in flight."""
        tokens = request.num_in_flight + count
        if self.memory.has_capacity(request, tokens):
            return True
        while (grants := self.memory.extend(request, tokens)) is None:
            if step.is_ahead:
                step.must_wait = True
                return False
            victim = next(other for other in reversed(self._running) if other.owner == request.owner)
            step.leave_out(victim)  # a decode makes room for a chunk in a window
            self._preempt(victim)
            step.has_preempted = True
            if victim is request:
                return False
        self._next.grants += grants
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
        self._next.vacate(request.row)
        self._slots.give_back(request)
        self.adapters.leave(request)
        self.lookahead.leave(request)
        request.num_in_flight = request.num_unknown = 0
        self.memory.release(request)

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.row >= 0:
            self._vacate(request)
        else:
            self._waiting.remove(request)
        request.move(status)
        self.adapters.end(request)
        del self._requests[request.request_id]
        if self.drafting:
            self.drafting.forget(request)
        self._next.drops.append(request.request_id)
        self.counters.finished_requests += 1
        self.counters.cancelled_requests += status is RequestStatus.CANCELLED
        self.counters.failed_requests += status is RequestStatus.FAILED

    def check(self) -> None:
        """Raises InternalError unless pages, rows, queue and states agree. For tests and idle moments."""
        self.memory.check(self._running)
        self.adapters.check(self._requests.values())
        standing = Standing(self._running, self._waiting.requests(), self._slots.requests, self._slots.free)
        check_standing(standing, self._requests, _place)


def _place(request: Request) -> tuple[int, int]:
    return request.options.priority, request.order
