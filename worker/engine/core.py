"""EngineCore: the step loop of one rank, leader or follower.

The leader's loop is `schedule → publish → execute → apply → deliver`, a follower's `receive → execute`. Whatever goes
wrong in it ends the world: the ranks would no longer agree.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from allspan.protos.api.counters import EngineCounters
from allspan.protos.api.errors import (
    AllspanError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    Unavailable,
)
from allspan.protos.config.settings import WorkerConfig
from allspan.worker.engine.batch import Batch
from allspan.worker.engine.inbox import Inbox
from allspan.worker.engine.loop import StepLoop
from allspan.worker.engine.pending import Pending
from allspan.worker.engine.runner import Runner
from allspan.worker.engine.statistics import scheduler_statistics
from allspan.worker.parallel.base import Collectives, PlanChannel
from allspan.worker.sampling.grammar import MaskMaker
from allspan.worker.sampling.grammar_cache import Grammars
from allspan.worker.sampling.sampler import Sampler
from allspan.worker.scheduler.drafting import Drafting, drafter_of
from allspan.worker.scheduler.limits import GroupLimits, limits_of
from allspan.worker.scheduler.lookahead import DEPTH, Lookahead
from allspan.worker.scheduler.page_manager import PrefixSettings
from allspan.worker.scheduler.plan import Operation, StepPlan, StepResult
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.scheduler import Outcome, Scheduler
from allspan.worker.step.backend import StepParts
from allspan.worker.step.buffer_sizes import batch_sizes
from allspan.worker.step.model import PageTiers, StepModel

IDLE_SECONDS = 0.5  # an idle loop wakes so often to count progress

OnOutputs = Callable[[list[Outcome]], None]
OnOperation = Callable[[Operation], None]

_WEIGHTS = (Operation.UNLOAD_WEIGHTS, Operation.RELOAD_WEIGHTS)


class EngineCore:
    """Submit and cancel from any thread; `run()` (or `step()`, in tests) from one.

    `on_outputs` is called by that thread on the leader, once a step, with new tokens and ends of requests: each
    accepted request ends exactly once, also when the loop fails or is shut down. It must not wait for the core.
    """

    def __init__(
        self,
        config: WorkerConfig,
        model: StepModel,
        num_pages: int | tuple[GroupLimits, ...],
        collectives: Collectives,
        parts: StepParts,
        channel: PlanChannel | None = None,
        eos_token_ids: tuple[int, ...] = (),
        tiers: PageTiers | None = None,
    ) -> None:
        """`num_pages`, of one cache group or of each, must be the same on every rank. `parts` come from the device's
        backend. `channel` may be None in a world of one rank. `tiers` None: no host tier."""
        if channel is None and collectives.size > 1:
            raise InternalError(f"a world of {collectives.size} ranks needs a plan channel")
        most = config.scheduler
        self.is_leader = collectives.rank == 0
        self.limits = limits_of(config, sum(model.vocab_widths), model.max_model_len, num_pages, model.row_inputs)
        self.progress = 0
        self.on_outputs: OnOutputs = lambda outcomes: None
        self.on_operation: OnOperation = lambda operation: None
        """Called on every rank for each operation but SHUTDOWN, at the same step. It must end alike on all ranks: an
        AllspanError is told to the caller of `operate` and the loop goes on; anything else ends the world."""
        self.within_step: Callable[[], int] = lambda: 0
        self.weights_version, self.weights_loaded = 1, True
        self._operations: deque[Pending] = deque()
        self._operating: Pending | None = None
        epoch = config.service.epoch
        self._rank = collectives.rank
        self._model = model
        self._channel = channel
        prefix = PrefixSettings(
            config.cache.enable_prefix_caching, config.model.name, tiers.num_host_pages if tiers else 0
        )
        # The leader's queue is the limit that callers meet; the inbox also holds what runs and what was just withdrawn.
        self._inbox = Inbox(2 * (most.max_queued_requests + most.max_num_seqs))
        sizes = batch_sizes(config, model.max_model_len)
        self.masks = masks = MaskMaker(config.parallel.cpus)
        self.grammars = Grammars(config.model.path, self.limits.vocab_size, config.parallel.cpus)
        self._sampler = sampler = Sampler(
            most.max_num_seqs, model.vocab_widths, collectives, eos_token_ids, parts.sampling, masks
        )
        lifetimes, has_adapters = [each.lifetime for each in self.limits.groups()], model.row_inputs.num_adapters > 0
        self._batch = Batch(sizes, sampler, parts.inputs, tiers, lifetimes, has_adapters)
        depth = DEPTH if most.async_scheduling and parts.inputs.runs_ahead else 1
        runner, lookahead = Runner(model, sampler, self._batch), Lookahead(depth, sampler.samples_ahead)
        self._loop = StepLoop(runner, self._inbox, self._operate, channel, epoch, depth)
        self._scheduler = Scheduler(self.limits, eos_token_ids, epoch, prefix, lookahead=lookahead)
        self._changed = threading.Condition()
        self._outbox: list[Outcome] = []
        self._accepts, self._stopped_because = True, ""
        self._stopping = self._is_over = False
        self._failure: BaseException | None = None
        self._operation_error: AllspanError | None = None
        self._refused = self._checked_step = 0
        self._progressed_at = time.monotonic()

    def submit(self, request: Request) -> None:
        """Leader: queues a request. Follower: keeps its payload until a plan joins it. One that has a grammar is
        compiled first, unless it comes with it: whatever waits here, no step does. Raises InvalidRequest,
        QueueFull, AlreadyExists, or Unavailable when the model is stopped or the loop has ended."""
        if self._channel is not None and not self.is_leader:
            self._channel.expect()
        request.digest()  # here, and not in the step that it joins
        if (grammar := request.params.grammar) is not None and request.grammar is None:
            request.grammar = self.grammars.compiled(grammar)
        with self._changed:
            if cause := self.refusal:
                raise Unavailable(cause)
            if not self.is_leader:
                self.limits.admit(request)
            try:
                self._inbox.put(request)
                if self.is_leader:
                    self._enqueue(request)
            except QueueFull:
                self._refused += 1
                raise

    def cancel(self, request_ids: Iterable[bytes]) -> None:
        """Leader: ends requests in whatever state they are. Follower: gives back payloads that no plan has joined.
        Idempotent; unknown ids are passed over."""
        request_ids = tuple(request_ids)
        if not self.is_leader:
            self._inbox.withdraw(request_ids)
            return
        with self._changed:
            for request_id in request_ids:
                outcome = self._scheduler.cancel(request_id)
                if outcome is not None:
                    self._inbox.retire(request_id)
                    self._outbox.append(outcome)
            self._changed.notify_all()

    def start_model(self) -> None:
        """Lets new requests in again. Raises Unavailable while the weights are unloaded, or about to be."""
        with self._changed:
            if not self.weights_loaded:
                raise Unavailable("the weights are unloaded; reload them first (reload_weights)")
            if any(pending.operation in _WEIGHTS for pending in self._operations):
                raise Unavailable("the weights are being unloaded or reloaded; start the model after that")
            self._accepts = True

    def stop_model(self, timeout: float, why: str = "the model is stopped; start it with start_model") -> None:
        """Refuses new requests (told `why`) and waits for those that are open; DeadlineExceeded after `timeout` s."""
        with self._changed:
            self._accepts, self._stopped_because = False, why
            drained = self._changed.wait_for(
                lambda: self._is_over or not (self.is_leader and self._scheduler.requests()), timeout
            )
            if not drained:
                raise DeadlineExceeded(
                    f"{len(self._scheduler.requests())} requests still run after {timeout:g} s of draining"
                )

    def operate(self, operation: Operation, timeout: float) -> None:
        """Leader: has all ranks do something at the same step, and waits for its end. Raises DeadlineExceeded after
        `timeout` seconds, Unavailable when the loop ends or, for weights, while the model is not stopped and drained
        (`stop_model`), InvalidRequest on a follower, and what `on_operation` raised."""
        if not self.is_leader:
            raise InvalidRequest(f"this is rank {self._rank}, operations go to rank 0", "operation")
        pending = Pending(operation)
        with self._changed:
            self._check_alive()
            if operation in _WEIGHTS and (self._accepts or self._scheduler.requests()):
                raise Unavailable(f"{operation.name.lower()} needs a stopped model; call stop_model first")
            self._operations.append(pending)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: pending.is_done or self._is_over, timeout):
                if not pending.is_planned:
                    self._operations.remove(pending)
                raise DeadlineExceeded(f"{operation.name.lower()} has not ended after {timeout:g} s")
            if not pending.is_done:
                self._check_alive()
        if pending.error is not None:
            raise pending.error

    def draft_with(self, drafter: str, most: int) -> None:
        """Leader, before the first step: verifies up to `most` drafts of a request in a step. ConfigError for a drafter
        that DRAFTERS does not have."""
        self._scheduler.drafting = Drafting(drafter_of(drafter), most, self._sampler.verifies_drafts)

    def reset_prefix_cache(self) -> None:
        """Leader: forgets every cached page; those in use are forgotten when they are given back."""
        if not self.is_leader:
            raise InvalidRequest(f"this is rank {self._rank}, operations go to rank 0", "operation")
        with self._changed:
            self._scheduler.memory.reset()

    def beat(self) -> None:
        """Counts progress; a long operation calls it now and then from the loop's thread."""
        self.progress += 1
        self._progressed_at = time.monotonic()

    def shutdown(self) -> None:
        """Leader: ends the loop of every rank; open requests fail with Unavailable. A follower ends with its leader."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    @property
    def state(self) -> str:
        """ "running", "stopped" (lets nothing in) or "failed"."""
        if self._failure is not None:
            return "failed"
        return "running" if self._accepts and not self._is_over else "stopped"

    @property
    def refusal(self) -> str:
        """Why nothing is let in, "" while it is. Takes no lock."""
        return self._end_cause or ("" if self._accepts else self._stopped_because)

    @property
    def is_busy(self) -> bool:
        """A step is being executed, or work waits for one. Takes no lock: a loop that hangs may hold it."""
        return self._loop.is_executing or (self.is_leader and (self._scheduler.has_work or bool(self._operations)))

    @property
    def steps(self) -> int:
        """Plans executed so far."""
        return self._loop.steps

    @property
    def advance(self) -> int:
        """`progress`, and what the step under way has come to (`within_step`): busy, it hangs where this stands."""
        return self.progress + self.within_step()

    @property
    def progress_age_s(self) -> float:
        """Seconds since the loop last came round; idle, it comes round every IDLE_SECONDS."""
        return time.monotonic() - self._progressed_at

    def statistics(self) -> EngineCounters:
        """Takes no lock that a step holds for long."""
        own: dict[str, Any] = {
            "page_size": self.limits.page_size,
            "refused_requests": self._refused,
            "steps": self._loop.steps,
            "host_s": max(self._loop.host_s, 0.0),
            "model_s": self._loop.runner.model_s,
            "weights_version": self.weights_version,
            "weights_loaded": self.weights_loaded,
        }
        if not self.is_leader:
            return EngineCounters(**(own | {"running": self._batch.num_rows}))
        with self._changed:
            return EngineCounters(**(scheduler_statistics(self._scheduler) | own))

    def run(self) -> None:
        """Steps until `shutdown` (a follower: until the leader's). Raises what broke the loop."""
        try:
            while not self._is_over:
                if not self.step() and self.is_leader:
                    self._sleep()
                self.beat()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def step(self) -> bool:
        """One round of the loop; False when there was nothing to do."""
        return self._loop.lead(self) if self.is_leader else self._loop.follow(IDLE_SECONDS)

    def check(self) -> None:
        """Raises InternalError unless the scheduler's invariants hold. For tests and idle moments."""
        with self._changed:
            self._scheduler.check()

    def plan(self) -> StepPlan | None:
        """Leader: the next step; None when none can be planned now. An operation waits until no step is in flight."""
        with self._changed:
            ended, self._outbox = self._outbox + self._expire(), []
            pending = self._operations[0] if self._operations and not self._stopping else None
            operation = Operation.SHUTDOWN if self._stopping else pending.operation if pending else Operation.NONE
            plan = self._scheduler.schedule(operation)
            if pending and plan:
                pending.is_planned, self._operating = True, pending
        if ended:
            self.on_outputs(ended)
        return plan

    def finish(self, result: StepResult) -> None:
        """Leader: takes a step's tokens in and reports them."""
        with self._changed:
            outcomes = self._scheduler.apply(result)
            if pending := self._operating:
                self._operations.popleft()
                self._operating = None
                pending.is_done, pending.error = True, self._operation_error
            self._changed.notify_all()
        if outcomes:
            self.on_outputs(outcomes)

    def _expire(self) -> list[Outcome]:
        expired = self._scheduler.expire()
        for request, _ in expired:
            self._inbox.retire(request.request_id)
        return expired

    def _operate(self, operation: Operation) -> None:
        if operation is Operation.SHUTDOWN:
            self._is_over = True
            return
        self._operation_error = None
        if operation in _WEIGHTS:
            # However it ends, what was computed is void: the pages' memory may be gone, the weights be others.
            self.weights_loaded = False
            self.weights_version += operation is Operation.RELOAD_WEIGHTS
            with self._changed:
                self._scheduler.memory.invalidate(self.weights_version)
        try:
            self.on_operation(operation)
        except AllspanError as error:
            self._operation_error = error
            return
        if operation is Operation.RELOAD_WEIGHTS:
            self.weights_loaded = True

    def _enqueue(self, request: Request) -> None:
        try:
            self._scheduler.submit(request)  # checks it against the limits, too
        except AllspanError:
            self._inbox.drop(request.request_id)
            raise
        self._changed.notify_all()

    def _sleep(self) -> None:
        with self._changed:
            woken = self._changed.wait_for(
                lambda: self._scheduler.has_work or bool(self._operations) or self._stopping, IDLE_SECONDS
            )
            if not woken and self._checked_step != self._loop.steps:  # once an idle spell: it looks at every page
                self._checked_step = self._loop.steps
                self._scheduler.check()

    @property
    def _end_cause(self) -> str:
        """Why the loop ends or has ended, "" while it goes on."""
        if self._failure is not None:
            named = "" if isinstance(self._failure, AllspanError) else f"{type(self._failure).__name__}: "
            return f"the engine of rank {self._rank} has failed: {named}{self._failure}"
        return "the engine is shutting down" if self._stopping or self._is_over else ""

    def _check_alive(self) -> None:
        if cause := self._end_cause:
            raise Unavailable(cause)

    def _end(self, failure: BaseException | None) -> None:
        """The loop is over: nothing more is let in, and every open request is told."""
        with self._changed:
            self._is_over = True
            self._failure = failure
            ended, self._outbox = self._outbox, []
            ended += self._scheduler.abandon(Unavailable(self._end_cause))
            self._changed.notify_all()
        if ended:
            self.on_outputs(ended)
