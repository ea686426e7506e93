"""StepLoop: one rank's steps, in two forms that give equal tokens: plain, where the host plans a step when the one
before is over, and overlapped, where the next steps are planned and launched while a device, or another stage of a
pipeline, still runs one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from allspan.protos.api.errors import InternalError
from allspan.worker.engine.batch.inbox import Inbox
from allspan.worker.engine.steps.runner import Operate, Runner
from allspan.worker.engine.steps.stage_runner import StageRunner
from allspan.worker.parallel.base import PlanChannel
from allspan.worker.scheduler.codec import decode, encode
from allspan.worker.scheduler.plan import StepPlan, StepResult


class Planner(Protocol):
    """What the leader's loop asks for plans."""

    def plan(self) -> StepPlan | None:
        """The next step; None: none can be planned now."""

    def finish(self, result: StepResult) -> None:
        """Takes a step's tokens in."""

    def deliver(self) -> None:
        """Reports what the steps that were finished have made."""


class Progress:
    """Counts the rounds of a step loop, so that a hanging loop differs from an idle one. Reading takes no lock."""

    def __init__(self) -> None:
        self.rounds = 0
        self.within_step: Callable[[], int] = lambda: 0
        """Counts up while a long step goes on."""
        self._moved_at = time.monotonic()

    def beat(self) -> None:
        """Counts a round; a long operation calls it now and then from the loop's thread."""
        self.rounds += 1
        self._moved_at = time.monotonic()

    @property
    def total(self) -> int:
        """Rounds, and what the step under way has come to: a loop that is busy hangs where this stands."""
        return self.rounds + self.within_step()

    @property
    def age_s(self) -> float:
        """Seconds since the last round; an idle loop comes round every half second."""
        return time.monotonic() - self._moved_at


class StepLoop:
    """Carries plans out: the leader's own ones (`lead`), or on another rank those that come by the channel
    (`follow`)."""

    def __init__(
        self,
        runner: Runner | StageRunner,
        inbox: Inbox,
        operate: Operate,
        channel: PlanChannel | None,
        epoch: int,
        depth: int,
    ) -> None:
        """`depth`: most steps in flight; 1 is the plain loop. The same on every rank."""
        self.runner = runner
        self.depth = depth
        self.steps = 0
        """Plans executed so far."""
        self.host_s = 0.0
        """Seconds of steps outside the model, without those of waiting for another stage."""
        self.is_executing = False
        self._inbox = inbox
        self._operate = operate
        self._channel = channel
        self._epoch = epoch

    def lead(self, planner: Planner) -> bool:
        """One round; False when there was nothing to do."""
        started, apart_s = time.perf_counter(), self._apart_s
        has_worked = self.overlapped_round(planner) if self.depth > 1 else self.plain_round(planner)
        if has_worked:
            self.host_s += time.perf_counter() - started - (self._apart_s - apart_s)
        return has_worked

    def plain_round(self, planner: Planner) -> bool:
        """Plans, runs and finishes one step."""
        plan = self._publish(planner)
        if plan is None:
            return False
        planner.finish(self._run(plan))
        planner.deliver()
        return True

    def overlapped_round(self, planner: Planner) -> bool:
        """Fills the queue of steps in flight, then finishes the oldest. Where that leaves the device without any, the
        next one is launched before callers are told."""
        self._launch_all(planner)
        if not self.runner.num_in_flight:
            return False
        planner.finish(self._land())
        if not self.runner.num_in_flight:
            self._launch_all(planner)
        planner.deliver()
        return True

    def expect(self) -> None:
        """A request has come to this rank, so the leader's plan that joins it will follow; returns at once."""
        if self._channel is not None:
            self._channel.expect()

    def follow(self, timeout: float) -> bool:
        """Carries out the next plan of the leader; False when none has come for `timeout` seconds."""
        assert self._channel is not None
        data = self._channel.receive(timeout)
        if data is None:
            return False
        started, apart_s = time.perf_counter(), self._apart_s
        plan = decode(data)
        if self.depth > 1:
            while self.runner.num_in_flight > plan.in_flight:
                self._land()
            self._launch(plan)
            if self.runner.lands_at_once:  # the leader, too, plans no step before
                self._land()
        else:
            self._run(plan)
        self.host_s += time.perf_counter() - started - (self._apart_s - apart_s)
        return True

    def _launch_all(self, planner: Planner) -> None:
        """Launches all steps that can be planned."""
        while self.runner.num_in_flight < self.depth and (plan := self._publish(planner)) is not None:
            self._launch(plan)

    @property
    def _apart_s(self) -> float:
        """Seconds that are not the host's."""
        return self.runner.model_s + self.runner.wait_s

    def _publish(self, planner: Planner) -> StepPlan | None:
        plan = planner.plan()
        if plan is not None and self._channel is not None:
            self._channel.publish(encode(plan))
        return plan

    def _run(self, plan: StepPlan) -> StepResult:
        self._begin(plan)
        try:
            return self.runner.run(plan, self._inbox, self._operate)
        finally:
            self.is_executing = False

    def _launch(self, plan: StepPlan) -> None:
        self._begin(plan)
        try:
            self.runner.launch(plan, self._inbox, self._operate)
        finally:
            self.is_executing = False

    def _land(self) -> StepResult:
        self.is_executing = True
        try:
            return self.runner.land()
        finally:
            self.is_executing = False

    def _begin(self, plan: StepPlan) -> None:
        if plan.epoch != self._epoch or plan.step != self.steps + 1:
            raise InternalError(
                f"this rank got the plan of epoch {plan.epoch}, step {plan.step}; "
                f"it awaits epoch {self._epoch}, step {self.steps + 1}"
            )
        self.steps = plan.step
        self.is_executing = True
