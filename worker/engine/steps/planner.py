"""LeaderPlanner: requests and operations of the leader, made into plans; what its steps yield, handed to callers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from allspan.protos.api.counters import counters_of
from allspan.protos.api.errors import AllspanError, DeadlineExceeded, Unavailable
from allspan.worker.adapters.registry import drop_argument
from allspan.worker.engine.batch.inbox import Inbox
from allspan.worker.engine.operations import Operations
from allspan.worker.engine.status import EngineStatus
from allspan.worker.scheduler.counters import Load
from allspan.worker.scheduler.plan import Operation, StepPlan, StepResult
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.scheduler import Outcome, Scheduler

EXPECTED_TOKENS = 256
"""Output tokens of a request that count as load at most: `max_tokens` is often far above the real length."""

OnOutputs = Callable[[list[Outcome]], None]


class LeaderPlanner:
    """Calls the scheduler under one lock, `changed`, so that callers and the step loop may use it at once; every
    outcome goes to `on_outputs` from the loop's thread, outside the lock. A follower's plans nothing."""

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Inbox,
        operations: Operations,
        status: EngineStatus,
        changed: threading.Condition,
        on_outputs: OnOutputs,
    ) -> None:
        self.scheduler = scheduler
        self._inbox = inbox
        self._operations = operations
        self._status = status
        self._changed = changed
        self._on_outputs = on_outputs
        self._ended: list[Outcome] = []
        """Ends of requests that were cancelled; the next plan's round reports them."""
        self._news: list[Outcome] = []
        """What steps have made that was not reported yet."""
        self._checked_step = 0

    @property
    def has_work(self) -> bool:
        """True if a request or an operation waits for a step. Takes no lock: a loop that hangs may hold it."""
        return self.scheduler.has_work or bool(self._operations)

    def submit(self, request: Request) -> None:
        """Queues a request whose payload is in the inbox; one that is refused leaves it. Raises as
        `Scheduler.submit`."""
        with self._changed:
            try:
                self.scheduler.submit(request)  # checks it against the limits, too
            except AllspanError:
                self._inbox.drop(request.request_id)
                raise
            self._changed.notify_all()

    def cancel(self, request_ids: Iterable[bytes]) -> None:
        """Ends requests in whatever state they are; unknown ids are passed over."""
        with self._changed:
            for request_id in request_ids:
                outcome = self.scheduler.cancel(request_id)
                if outcome is not None:
                    self._inbox.retire(request_id)
                    self._ended.append(outcome)
            self._changed.notify_all()

    def drain(self, timeout: float) -> None:
        """Waits until no request is open, or the loop has ended. DeadlineExceeded after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._status.has_ended or self.is_drained(), timeout):
                raise DeadlineExceeded(
                    f"{len(self.scheduler.requests())} requests still run after {timeout:g} s of draining"
                )

    def is_drained(self) -> bool:
        """True if no request is open."""
        return not self.scheduler.requests()

    def plan(self) -> StepPlan | None:
        """Returns the next step; None when none can be planned now, or any more. An operation waits until no step is in
        flight."""
        with self._changed:
            if self._status.has_ended:
                return None
            ended, self._ended = self._ended + self._expire(), []
            for adapter in self.scheduler.adapters.take_unused():
                self._operations.add(Operation.DROP_ADAPTER, drop_argument(adapter))
            operation, argument = self._operations.next_operation()
            plan = self.scheduler.schedule(operation, argument)
            if operation and plan is not None:
                self._operations.planned()
        if self._news:
            self._news += ended
        elif ended:
            self._on_outputs(ended)
        return plan

    def finish(self, result: StepResult) -> None:
        """Takes a step's tokens in; `deliver` reports them."""
        with self._changed:
            self._news += self.scheduler.apply(result)
            self._operations.finish()
            self._changed.notify_all()

    def deliver(self) -> None:
        """Reports what the steps that were finished have made."""
        news, self._news = self._news, []
        if news:
            self._on_outputs(news)

    def wait_for_work(self, timeout: float, step: int) -> None:
        """Waits until there is something to plan, at most `timeout` seconds. The scheduler's invariants are checked
        once an idle spell (`step` is the last one run), as that looks at every page."""
        with self._changed:
            woken = self._changed.wait_for(lambda: self.has_work or self._status.is_ending, timeout)
            if not woken and self._checked_step != step:
                self._checked_step = step
                self.scheduler.check()

    def end(self) -> None:
        """Fails every open request with Unavailable: the loop is over."""
        with self._changed:
            self._news += self._ended + self.scheduler.abandon(Unavailable(self._status.cause))
            self._ended = []
            self._changed.notify_all()
        self.deliver()

    def invalidate(self, weights_version: int) -> None:
        """Forgets every cached page, and what running requests have computed."""
        with self._changed:
            self.scheduler.memory.invalidate(weights_version)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached page; those in use are forgotten when they are given back."""
        with self._changed:
            self.scheduler.memory.reset()

    def check(self) -> None:
        """Raises InternalError unless the scheduler's invariants hold."""
        with self._changed:
            self.scheduler.check()

    def statistics(self) -> dict[str, Any]:
        """Returns the values of `EngineCounters` that the scheduler counts, and the defaults of the others."""
        with self._changed:
            return _statistics(self.scheduler)

    def load(self) -> Load:
        """Returns what there is to do. Takes no lock, so that the values may be of two steps."""
        return _load(self.scheduler)

    def _expire(self) -> list[Outcome]:
        expired = self.scheduler.expire()
        for request, _ in expired:
            self._inbox.retire(request.request_id)
        return expired


def _load(scheduler: Scheduler) -> Load:
    pages = scheduler.memory.told_counts
    queued = 0
    for request in scheduler.requests():
        output = len(request.output_token_ids)
        queued += max(len(request.prompt_token_ids) + output - request.num_computed - 1, 0)
        queued += min(max(request.max_tokens - output, 0), EXPECTED_TOKENS)
    return Load(
        scheduler.num_running, scheduler.num_waiting, queued, pages.used, pages.total, cached_pages=pages.cached
    )


def _statistics(scheduler: Scheduler) -> dict[str, Any]:
    groups = scheduler.memory.counts
    fullest = max(groups, key=lambda pages: pages.used / pages.total)
    held = scheduler.limits.context_tokens([pages.total for pages in groups])
    free = scheduler.limits.context_tokens([pages.available for pages in groups])
    prompt, generated = scheduler.tokens_per_s()
    return counters_of(scheduler.counters) | {
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "pages_total": sum(pages.total for pages in groups),
        "pages_used": sum(pages.used for pages in groups),
        "pages_cached": sum(pages.cached for pages in groups),
        "fullest_pages_total": fullest.total,
        "fullest_pages_used": fullest.used,
        "free_tokens": min(free),
        "filling_tokens": max(held),
        "host_pages_total": sum(pages.host_total for pages in groups),
        "host_pages_used": sum(pages.host_used for pages in groups),
        "adapter_slots": scheduler.adapters.num_slots,
        "adapters_loaded": len(scheduler.adapters),
        "adapter_swaps": scheduler.adapters.num_swaps,
        "prompt_tokens_per_s": prompt,
        "generated_tokens_per_s": generated,
        "accepted_per_position": tuple(scheduler.counters.accepted_per_position),
        "step_tokens": tuple(scheduler.counters.step_tokens),
    }
