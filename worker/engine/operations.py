"""Operations that all ranks carry out at the same step: their queue on the leader, and what a rank does at one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from allspan.protos.api.errors import AllspanError, DeadlineExceeded, Unavailable
from allspan.worker.engine.status import EngineStatus
from allspan.worker.scheduler.plan import Operation, StepPlan

OnOperation = Callable[[Operation, bytes], None]

_WEIGHTS = (Operation.UNLOAD_WEIGHTS, Operation.RELOAD_WEIGHTS)


@dataclass(slots=True)
class Pending:
    """An operation on its way into a plan; `error` once it is done and has failed."""

    operation: Operation
    argument: bytes = b""
    is_planned: bool = False
    is_done: bool = False
    error: AllspanError | None = None


class Operations:
    """The leader's queue of operations: callers wait in `request`, the planner takes `next_operation` and calls
    `planned` and `finish`, all of them holding `changed`. On every rank the step loop calls `carry_out`."""

    def __init__(self, changed: threading.Condition, status: EngineStatus) -> None:
        """`changed` is notified whenever an operation is queued or finished; `status` of the same engine."""
        self.on_operation: OnOperation = lambda operation, argument: None
        """Called on every rank for each operation but SHUTDOWN, with its argument, at the same step. It must end alike
        on all ranks: an AllspanError is raised for the caller of `request` and the loop goes on; anything else ends all
        ranks."""
        self.rebalance: Callable[[float], None] = lambda timeout: None
        """The leader's: places experts by their load, within `timeout` seconds."""
        self.weights_version, self.weights_loaded = 1, True
        self._changed = changed
        self._status = status
        self._queue: deque[Pending] = deque()
        self._planned: Pending | None = None
        self._error: AllspanError | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def changes_weights(self) -> bool:
        """True while an operation on the weights is queued or under way."""
        return any(pending.operation in _WEIGHTS for pending in self._queue)

    def request(
        self, operation: Operation, timeout: float, is_drained: Callable[[], bool], argument: bytes = b""
    ) -> None:
        """Queues an operation and waits for its end. Raises DeadlineExceeded after `timeout` seconds, Unavailable when
        the loop ends or, for weights, while the model is not stopped and drained, and what `on_operation` raised."""
        with self._changed:
            self._status.check_alive()
            if operation in _WEIGHTS and (self._status.accepts or not is_drained()):
                raise Unavailable(f"{operation.name.lower()} needs a stopped model; call stop_model first")
            pending = self.add(operation, argument)
            if not self._changed.wait_for(lambda: pending.is_done or self._status.has_ended, timeout):
                if not pending.is_planned:
                    self._queue.remove(pending)
                raise DeadlineExceeded(f"{operation.name.lower()} has not ended after {timeout:g} s")
            if not pending.is_done:
                self._status.check_alive()
        if pending.error is not None:
            raise pending.error

    def add(self, operation: Operation, argument: bytes = b"") -> Pending:
        """Queues an operation and returns at once."""
        pending = Pending(operation, argument)
        with self._changed:
            self._queue.append(pending)
            self._changed.notify_all()
        return pending

    def wait(self, pending: Pending, timeout: float) -> None:
        """Waits for the end of an operation that `add` has queued, whose errors it does not raise. Raises
        DeadlineExceeded after `timeout` seconds, when it still comes, and Unavailable when the loop ends."""
        with self._changed:
            if not self._changed.wait_for(lambda: pending.is_done or self._status.has_ended, timeout):
                raise DeadlineExceeded(f"{pending.operation.name.lower()} has not ended after {timeout:g} s")
            if not pending.is_done:
                self._status.check_alive()

    def next_operation(self) -> tuple[Operation, bytes]:
        """Returns what the next plan is to carry, with its argument: the shutdown before all others, NONE when nothing
        is queued."""
        if self._status.is_ending:
            return Operation.SHUTDOWN, b""
        return (self._queue[0].operation, self._queue[0].argument) if self._queue else (Operation.NONE, b"")

    def planned(self) -> None:
        """A plan carries the operation that `next_operation` returned."""
        if not self._status.is_ending:
            self._planned = self._queue[0]
            self._planned.is_planned = True

    def finish(self) -> None:
        """A step is over; if its plan carried an operation, the caller of `request` gets its result."""
        if pending := self._planned:
            self._queue.popleft()
            self._planned = None
            pending.is_done, pending.error = True, self._error

    def carry_out(self, plan: StepPlan, invalidate: Callable[[int], None]) -> None:
        """Does what a plan says, between two steps. `invalidate` is called with the new version before weights change:
        however that ends, what was computed is void, as the pages' memory may be gone or the weights be others."""
        operation = plan.operation
        if operation is Operation.SHUTDOWN:
            with self._changed:  # another thread may be closing or stopping the engine
                self._status.end()
                self._changed.notify_all()
            return
        self._error = None
        if operation in _WEIGHTS:
            self.weights_loaded = False
            self.weights_version += operation is Operation.RELOAD_WEIGHTS
            invalidate(self.weights_version)
        try:
            self.on_operation(operation, plan.argument)
        except AllspanError as error:
            self._error = error
            return
        if operation is Operation.RELOAD_WEIGHTS:
            self.weights_loaded = True
